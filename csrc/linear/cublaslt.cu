// The bridge to cuBLASLt: found and opened when first needed, one algorithm pinned per shape.
//
// The library is not linked: a machine without it runs our own tiles. Python may have opened it already (from a wheel, by path);
// asking for it by name then finds that copy. What is kept for the process is what cannot be made anew for each call: a handle
// per device, and per weight shape the algorithm that the library's heuristic names for a reference number of rows. Only
// algorithms without workspace and without split k are taken, so that calls can be captured, allocate nothing, and a row's sum
// does not depend on the number of rows. The reference changes at 1024 rows: an algorithm for thousands leaves a few hundred on
// few multiprocessors. The declarations below are the part of the library's stable C interface that is used.
#include <dlfcn.h>

#include <map>
#include <mutex>
#include <tuple>

#include "linear/cublaslt.h"

namespace {

using namespace spark;

constexpr int64_t kFewRows = 1024;
constexpr int64_t kReferenceFew = 512, kReferenceMany = 4096;

using Status = int;
using Handle = void*;
using Object = void*;  // descriptors, layouts and preferences

struct Algorithm {
    uint64_t data[8];
};
struct Found {
    Algorithm algorithm;
    size_t workspace;
    Status state;
    float waves;
    int reserved[4];
};

constexpr int kComputeF32 = 68;
constexpr int kScaleF32 = 0;                                      // CUDA_R_32F
constexpr int kDescTransA = 3, kDescEpilogue = 7, kDescBias = 8;  // attributes of a product
constexpr int kLayoutColumns = 3;                                 // of a layout
constexpr int kPreferWorkspace = 1, kPreferReduction = 3;         // of a preference
constexpr int kPreferAlign[4] = {5, 6, 7, 8};
constexpr int32_t kTranspose = 1;
constexpr uint32_t kEpilogueNone = 1, kEpilogueBias = 4;

int library_type(DType type) { return type == DType::f32 ? 0 : type == DType::f16 ? 2 : 14; }  // CUDA_R_32F, _16F, _16BF

struct Api {
    Status (*create)(Handle*);
    Status (*desc_create)(Object*, int compute, int scale);
    Status (*desc_set)(Object, int, const void*, size_t);
    Status (*layout_create)(Object*, int type, uint64_t rows, uint64_t columns, int64_t leading);
    Status (*layout_set)(Object, int, const void*, size_t);
    Status (*preference_create)(Object*);
    Status (*preference_set)(Object, int, const void*, size_t);
    Status (*preference_destroy)(Object);
    Status (*heuristic)(Handle, Object desc, Object a, Object b, Object c, Object d, Object preference, int asked, Found*,
                        int* given);
    Status (*multiply)(Handle, Object desc, const void* alpha, const void* a, Object, const void* b, Object, const void* beta,
                       const void* c, Object, void* d, Object, const Algorithm*, void* workspace, size_t, cudaStream_t);

    // Whether all of it was found.
    bool open() {
        void* library = nullptr;
        for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12", "libcublasLt.so"}) {
            library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
            if (library != nullptr) break;
        }
        if (library == nullptr) return false;
        const auto find = [&](auto& function, const char* name) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            return function != nullptr;
        };
        return find(create, "cublasLtCreate") && find(desc_create, "cublasLtMatmulDescCreate") &&
               find(desc_set, "cublasLtMatmulDescSetAttribute") && find(layout_create, "cublasLtMatrixLayoutCreate") &&
               find(layout_set, "cublasLtMatrixLayoutSetAttribute") &&
               find(preference_create, "cublasLtMatmulPreferenceCreate") &&
               find(preference_set, "cublasLtMatmulPreferenceSetAttribute") &&
               find(preference_destroy, "cublasLtMatmulPreferenceDestroy") && find(heuristic, "cublasLtMatmulAlgoGetHeuristic") &&
               find(multiply, "cublasLtMatmul");
    }
};

// A pinned product: out^T = w x^T in the library's column order, w given transposed. `x` and `out` are layouts whose number of
// columns, our rows, is set anew for each call.
struct Plan {
    bool usable = false;
    Object product = nullptr, w = nullptr, x = nullptr, out = nullptr;
    Algorithm algorithm{};
};

// device, out type, type, n, k, bias or none, few rows or many
using Key = std::tuple<int, DType, DType, int64_t, int64_t, bool, bool>;

class Library {
  public:
    static Library& get() {
        static Library* const library = new Library();  // never freed: the driver may be gone when globals are
        return *library;
    }

    int run(const Key& key, void* out, const void* x, const void* w, const void* bias, int64_t rows, bool add,
            cudaStream_t stream) {
        if (!open_) return kUnsupported;
        const std::lock_guard<std::mutex> lock(mutex_);
        const Handle handle = handle_of(std::get<0>(key));
        if (handle == nullptr) return kUnsupported;
        auto found = plans_.find(key);
        if (found == plans_.end()) found = plans_.emplace(key, make(handle, key, bias)).first;
        Plan& plan = found->second;
        if (!plan.usable || !set_rows(plan, rows)) return kUnsupported;
        if (bias != nullptr && api_.desc_set(plan.product, kDescBias, &bias, sizeof(bias))) return kUnsupported;
        const float one = 1.f, before = add ? 1.f : 0.f;
        return api_.multiply(handle, plan.product, &one, w, plan.w, x, plan.x, &before, out, plan.out, out, plan.out,
                             &plan.algorithm, nullptr, 0, stream)
                   ? kUnsupported
                   : static_cast<int>(cudaSuccess);
    }

  private:
    Library() : open_(api_.open()) {}

    Handle handle_of(int device) {
        const auto found = handles_.find(device);
        if (found != handles_.end()) return found->second;
        // creating a handle is not work on a stream: let it happen beside a capture
        cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
        cudaThreadExchangeStreamCaptureMode(&mode);
        Handle handle = nullptr;
        if (api_.create(&handle)) handle = nullptr;
        cudaThreadExchangeStreamCaptureMode(&mode);
        handles_[device] = handle;
        return handle;
    }

    bool set_rows(const Plan& plan, int64_t rows) const {
        const uint64_t columns = rows;
        return !api_.layout_set(plan.x, kLayoutColumns, &columns, sizeof(columns)) &&
               !api_.layout_set(plan.out, kLayoutColumns, &columns, sizeof(columns));
    }

    Plan make(Handle handle, const Key& key, const void* bias) const {
        const auto [device, out_type, type, n, k, biased, few] = key;
        Plan plan;
        const uint64_t reference = few ? kReferenceFew : kReferenceMany;
        const uint32_t epilogue = biased ? kEpilogueBias : kEpilogueNone;
        if (api_.desc_create(&plan.product, kComputeF32, kScaleF32) ||
            api_.desc_set(plan.product, kDescTransA, &kTranspose, sizeof(kTranspose)) ||
            api_.desc_set(plan.product, kDescEpilogue, &epilogue, sizeof(epilogue)) ||
            (biased && api_.desc_set(plan.product, kDescBias, &bias, sizeof(bias))) ||
            api_.layout_create(&plan.w, library_type(type), k, n, k) ||
            api_.layout_create(&plan.x, library_type(type), k, reference, k) ||
            api_.layout_create(&plan.out, library_type(out_type), n, reference, n))
            return plan;
        Object preference = nullptr;
        if (api_.preference_create(&preference)) return plan;
        const uint64_t workspace = 0;
        const uint32_t reduction = 0, alignment = 16;
        bool set = !api_.preference_set(preference, kPreferWorkspace, &workspace, sizeof(workspace)) &&
                   !api_.preference_set(preference, kPreferReduction, &reduction, sizeof(reduction));
        for (const int operand : kPreferAlign)
            set = set && !api_.preference_set(preference, operand, &alignment, sizeof(alignment));
        constexpr int kAsked = 8;
        Found found[kAsked];
        int given = 0;
        if (set && !api_.heuristic(handle, plan.product, plan.w, plan.x, plan.out, plan.out, preference, kAsked, found, &given)) {
            for (int i = 0; i < given && !plan.usable; ++i) {
                if (found[i].state || found[i].workspace) continue;
                plan.algorithm = found[i].algorithm;
                plan.usable = true;
            }
        }
        api_.preference_destroy(preference);
        return plan;
    }

    Api api_{};
    bool open_;
    std::mutex mutex_;
    std::map<int, Handle> handles_;
    std::map<Key, Plan> plans_;
};

}  // namespace

int spark::cublaslt_linear(void* out, DType out_type, const void* x, const void* w, const void* bias, DType type, int64_t rows,
                           int64_t n, int64_t k, bool add, cudaStream_t stream) {
    int device = 0;
    cudaGetDevice(&device);
    return Library::get().run({device, out_type, type, n, k, bias != nullptr, rows <= kFewRows}, out, x, w, bias, rows, add,
                              stream);
}
