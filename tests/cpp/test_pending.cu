// An error of the CUDA runtime that a caller has not asked for yet is neither reported nor taken away by
// launches of the library. Needs a GPU. The library brings a runtime of its own, whose errors are its own,
// unless it is linked statically; so this is compiled with what launches: test_pending.cu gate.cu sums.cu.
#include <cuda_runtime.h>

#include <cstdio>

#include "elementwise/gate.h"
#include "elementwise/sums.h"

namespace {

constexpr int64_t kTokens = 64, kFeatures = 64;
int failures = 0;

void* take() {
    void* memory = nullptr;
    if (cudaMalloc(&memory, 1 << 20) != cudaSuccess || cudaMemset(memory, 0, 1 << 20) != cudaSuccess) {
        std::puts("there is no memory on the device");
        ++failures;
    }
    return memory;
}

template <class Launch>
void check(const char* name, Launch launch) {
    const cudaError_t pending = cudaSetDevice(1000);  // of the caller's
    const int32_t code = launch();
    const cudaError_t left = cudaGetLastError();
    if (pending == cudaErrorInvalidDevice && code == cudaSuccess && left == pending &&
        cudaDeviceSynchronize() == cudaSuccess)
        return;
    std::printf("%s: code %d, and the last error is %s\n", name, code, cudaGetErrorString(left));
    ++failures;
}

}  // namespace

int main() {
    using namespace ts;
    const Matrix a{take(), kFeatures, Layout::row_major}, b{take(), kFeatures, Layout::row_major},
        c{take(), kFeatures, Layout::row_major}, d{take(), kFeatures, Layout::row_major},
        e{take(), kFeatures, Layout::row_major};
    const gate::Gate gate{DType::float32, Activation::silu, kTokens, kFeatures, a, b, c, d, e};
    check("gate", [&] { return gate::multiply(gate, nullptr); });
    check("gate_gradient", [&] { return gate::differentiate(gate, nullptr); });

    const Device device{DeviceType::cuda, 80, 16, 99 << 10};
    const sums::ActivationGradient gradient{DType::float32, Activation::gelu, kTokens, kFeatures,
                                            a.data,         b.data,           b.data,  c.data};
    check("activation_gradient", [&] { return sums::activate_backward(gradient, device, d.data, nullptr); });
    Problem problem{};
    problem.input_dtype = DType::float32;
    problem.tokens = kTokens;
    problem.pattern.out_features = kFeatures;
    problem.y = a;
    problem.bias_gradient = {b.data, DType::float32, false};
    check("sums", [&] { return sums::sum(problem, device, d.data, nullptr); });
    problem.y.layout = Layout::column_major;
    check("sums of lines", [&] { return sums::sum(problem, device, d.data, nullptr); });
    return failures;
}
