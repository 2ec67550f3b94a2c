// The ABI between Python and the kernels: every launcher has one signature and receives tagged arguments.
//
// defines: spark::Arg, spark::DType, spark::Args, SPARK_LAUNCHER, SPARK_CHECK, spark::launch_status
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace spark {

// Codes of sparkrt/runtime/dtypes.py.
enum class DType : int32_t {
    f32 = 0,
    f16 = 1,
    bf16 = 2,
    e4m3 = 3,
    e5m2 = 4,
    f64 = 5,
    i8 = 8,
    i32 = 9,
    i64 = 10,
    u8 = 11,
    u32 = 12,
};

enum class Kind : int32_t { none = 0, array = 1, integer = 2, real = 3 };

// One argument: a contiguous array, a number, or nothing (an optional array that was not given).
struct Arg {
    Kind kind;
    DType dtype;
    int32_t ndim;
    int32_t reserved;
    int64_t shape[5];
    void* ptr;
    int64_t integer;
    double real;
};

// What a launcher returns besides cudaError_t: the caller's mistake, told apart from the device's.
constexpr int kBadArgument = -1;
constexpr int kUnsupported = -2;

// Typed access to the argument list, in the order of the operator's signature (outputs, inputs, scalars).
class Args {
  public:
    Args(const Arg* args, int count) : args_(args), count_(count) {}
    int count() const { return count_; }
    bool given(int i) const { return args_[i].kind == Kind::array; }
    bool is(int i, DType dtype, int ndim) const { return given(i) && args_[i].dtype == dtype && args_[i].ndim == ndim; }
    DType dtype(int i) const { return args_[i].dtype; }
    int64_t dim(int i, int axis) const { return args_[i].shape[axis]; }
    int ndim(int i) const { return args_[i].ndim; }
    int64_t size(int i) const {
        int64_t n = 1;
        for (int a = 0; a < args_[i].ndim; ++a) n *= args_[i].shape[a];
        return n;
    }
    template <typename T>
    T* ptr(int i) const {
        return given(i) ? static_cast<T*>(args_[i].ptr) : nullptr;
    }
    // Whether 16-byte vectors of its element type tile array i: its start and every row of `width` elements.
    bool vectors(int i, int64_t width, int itemsize) const {
        return !given(i) || (reinterpret_cast<uintptr_t>(args_[i].ptr) % 16 == 0 && width * itemsize % 16 == 0);
    }
    int integer(int i) const { return static_cast<int>(args_[i].integer); }
    float real(int i) const {
        return args_[i].kind == Kind::integer ? static_cast<float>(args_[i].integer) : static_cast<float>(args_[i].real);
    }

  private:
    const Arg* args_;
    int count_;
};

inline int launch_status() { return static_cast<int>(cudaGetLastError()); }

}  // namespace spark

// A launcher: `SPARK_LAUNCHER(spark_rms_norm) { Args a(args, count); ... return spark::launch_status(); }`
#define SPARK_LAUNCHER(name) extern "C" int name(const spark::Arg* args, int count, cudaStream_t stream)

// Argument checks cost nothing next to a launch and turn a wrong call into an error instead of a fault.
#define SPARK_CHECK(condition)                        \
    do {                                              \
        if (!(condition)) return spark::kBadArgument; \
    } while (0)
