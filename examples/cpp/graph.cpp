// A product in a CUDA graph: captured once, and run again with whatever its operands then hold.
//
// y = x W^T in float32, where W [1024, 1024] keeps every fourth 64 x 64 block. Results of each replay are
// compared with sums in float64. The exit code is 1 where one is wrong, and 77, which CTest can take for
// skipped, without a GPU.

#include <cmath>
#include <cstdio>

#include <tilesparse/tilesparse.hpp>
#include "cuda_memory.h"
#include "numbers.h"

namespace {

namespace ts = tilesparse;
template <class T>
using OnGpu = ts::Buffer<T, CudaMemory>;

constexpr size_t kFeatures = 1024, kBlock = 64, kTokens = 256, kBlocks = kFeatures / kBlock;
constexpr int kReplays = 3, kTimed = 100;

std::vector<float> random_numbers(size_t size, uint32_t seed) {
    std::vector<float> numbers(size);
    for (size_t i = 0; i < size; ++i) {
        seed = seed * 1664525u + 1013904223u;
        put_eighths(numbers.data(), i, TS_FLOAT32, static_cast<int>(seed >> 28) - 8);
    }
    return numbers;
}

bool is_right(const ts::Pattern& pattern, const std::vector<float>& x, const std::vector<float>& values,
              const std::vector<float>& y) {
    for (size_t t = 0; t < kTokens; ++t)
        for (size_t n = 0; n < kFeatures; ++n) {
            double sum = 0, sizes = 0;
            const auto last = static_cast<size_t>(pattern.row_ptr()[n / kBlock + 1]);
            for (auto e = static_cast<size_t>(pattern.row_ptr()[n / kBlock]); e < last; ++e)
                for (size_t k = 0; k < kBlock; ++k) {
                    const size_t column = static_cast<size_t>(pattern.col_idx()[e]) * kBlock + k;
                    const double product =
                        static_cast<double>(x[t * kFeatures + column]) *
                        static_cast<double>(values[(e * kBlock + n % kBlock) * kBlock + k]);
                    sum += product;
                    sizes += std::fabs(product);
                }
            const double error = std::fabs(static_cast<double>(y[t * kFeatures + n]) - sum);
            if (!(error <= allowed_error(sum, sizes, kFeatures, TS_FLOAT32))) return false;
        }
    return true;
}

float milliseconds_of(cudaGraphExec_t graph, cudaStream_t stream) {
    cudaEvent_t begin = nullptr, end = nullptr;
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    check_cuda(cudaEventRecord(begin, stream));
    for (int i = 0; i < kTimed; ++i) check_cuda(cudaGraphLaunch(graph, stream));
    check_cuda(cudaEventRecord(end, stream));
    check_cuda(cudaEventSynchronize(end));
    float milliseconds = 0;
    check_cuda(cudaEventElapsedTime(&milliseconds, begin, end));
    check_cuda(cudaEventDestroy(begin));
    check_cuda(cudaEventDestroy(end));
    return milliseconds / kTimed;
}

int run() {
    std::vector<uint8_t> mask(kBlocks * kBlocks);
    for (size_t i = 0; i < mask.size(); ++i) mask[i] = (i + i / kBlocks) % 4 == 0;
    const auto pattern = ts::Pattern::from_mask(mask, {kFeatures, kFeatures}, {kBlock, kBlock});
    const auto values = random_numbers(pattern.values_size(), 1);
    std::vector<float> y(kTokens * kFeatures);

    // All memory is there before the capture, and stays where it is while the graph lives.
    const ts::DevicePattern<CudaMemory> pattern_on_gpu(pattern);
    const auto values_on_gpu = OnGpu<float>::copy_of(values);
    OnGpu<float> x_on_gpu(kTokens * kFeatures), y_on_gpu(y.size());
    ts::Product product(ts::Op::dds_nt, pattern_on_gpu, kTokens);
    product.x(x_on_gpu).values(values_on_gpu).y(y_on_gpu);
    const ts::Choice choice = product.select();
    const ts::Plan<CudaMemory> plan(pattern, choice.kernel, ts::Op::dds_nt);
    OnGpu<std::byte> workspace(product.plan(plan).workspace_size());

    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    check_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    product.run(workspace, stream);
    check_cuda(cudaStreamEndCapture(stream, &graph));
    check_cuda(cudaGraphInstantiateWithFlags(&executable, graph, 0));

    for (int replay = 0; replay < kReplays; ++replay) {
        const auto x = random_numbers(kTokens * kFeatures, 10 + static_cast<uint32_t>(replay));
        CudaMemory::copy(x_on_gpu.data(), x.data(), x_on_gpu.bytes());
        check_cuda(cudaGraphLaunch(executable, stream));
        check_cuda(cudaStreamSynchronize(stream));
        y_on_gpu.copy_to(y);
        if (!is_right(pattern, x, values, y)) {
            std::fprintf(stderr, "replay %d: a wrong result\n", replay);
            return 1;
        }
    }
    std::printf("%s: %d replays are right, %.4f ms each\n", choice.reason.c_str(), kReplays,
                static_cast<double>(milliseconds_of(executable, stream)));
    return 0;  // which frees graph and stream, too
}

}  // namespace

int main(int, char** arguments) {
    try {
        ts::device_info(ts::Device::cuda);
        return run();
    } catch (const ts::NoDeviceError& error) {
        std::fprintf(stderr, "%s: needs a GPU: %s\n", arguments[0], error.what());
        return 77;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", arguments[0], error.what());
        return 1;
    }
}
