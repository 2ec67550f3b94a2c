// The one Python binding: opens the kernel library and calls its launchers with tagged arguments.
//
// The kernels live in a plain C-ABI shared library, so that they are compiled once per architecture and not once per Python.
#include <dlfcn.h>
#include <pybind11/pybind11.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "common/launch.h"

namespace py = pybind11;
using spark::Arg;
using spark::Kind;

using Launcher = int (*)(const Arg*, int, cudaStream_t);

namespace {

constexpr int kMaxArgs = 32;

// Attribute names as Python strings, made once: a step that is not replayed makes hundreds of launches.
struct Names {
    py::object ptr = py::str("ptr"), address = py::str("address"), dtype = py::str("dtype"), code = py::str("code"),
               shape = py::str("shape");
};
Names* names;

// DeviceArray -> array, bool/int -> integer, float -> real, None -> none.
Arg convert(const py::handle& value) {
    Arg arg{};
    if (value.is_none()) {
        arg.kind = Kind::none;
    } else if (PyLong_Check(value.ptr())) {
        arg.kind = Kind::integer;
        arg.integer = value.cast<int64_t>();
    } else if (PyFloat_Check(value.ptr())) {
        arg.kind = Kind::real;
        arg.real = value.cast<double>();
    } else {
        arg.kind = Kind::array;
        arg.ptr = reinterpret_cast<void*>(value.attr(names->ptr).attr(names->address).cast<uintptr_t>());
        arg.dtype = static_cast<spark::DType>(value.attr(names->dtype).attr(names->code).cast<int>());
        const auto shape = value.attr(names->shape).cast<py::tuple>();
        if (shape.size() > 5) throw std::invalid_argument("an array of more than 5 axes");
        arg.ndim = static_cast<int32_t>(shape.size());
        for (size_t i = 0; i < shape.size(); ++i) arg.shape[i] = shape[i].cast<int64_t>();
    }
    return arg;
}

class Library {
  public:
    explicit Library(const std::string& path) : handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
        if (handle_ == nullptr) throw std::runtime_error(dlerror());
    }
    Library(const Library&) = delete;
    Library& operator=(const Library&) = delete;

    // The launcher's address, or 0 when the library has no such symbol.
    uintptr_t find(const std::string& symbol) const { return reinterpret_cast<uintptr_t>(dlsym(handle_, symbol.c_str())); }

    // Returns cudaError_t, or a negative code for a wrong call.
    static int launch(uintptr_t launcher, const py::sequence& values, uintptr_t stream) {
        const auto count = static_cast<int>(values.size());
        if (count > kMaxArgs) throw std::invalid_argument("too many arguments");
        Arg args[kMaxArgs];
        for (int i = 0; i < count; ++i) args[i] = convert(values[i]);
        const py::gil_scoped_release release;
        return reinterpret_cast<Launcher>(launcher)(args, count, reinterpret_cast<cudaStream_t>(stream));
    }

  private:
    void* handle_;
};

}  // namespace

PYBIND11_MODULE(_kernels, module) {
    names = new Names();  // never freed: Python is gone when globals are
    py::class_<Library>(module, "Library")
        .def(py::init<const std::string&>())
        .def("find", &Library::find)
        .def_static("launch", &Library::launch);
}
