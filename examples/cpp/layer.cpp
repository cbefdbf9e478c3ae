// One block-sparse layer of a checkpoint that tilesparse.save has written, on the GPU if there is one,
// otherwise on the CPU: how far the result is from one in float64 that is computed here, and how long the
// product takes.
//
//     layer FOLDER LAYER [TOKENS]
//
// The exit code is 1 where the result is wrong, or where a sentence says what else is. On the GPU it takes a
// build with the CUDA runtime, which CMakeLists.txt looks for.

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <functional>

#include "checkpoint.h"
#include "numbers.h"
#ifdef WITH_CUDA
#include "cuda_memory.h"
#endif

namespace {

namespace ts = tilesparse;

constexpr int kRepetitions = 21;

struct Outcome {
    std::string kernel;
    Bytes y;
    Bytes weights;  // dense blocks, in the dtype of the activations
    double milliseconds;
};

Bytes random_x(const Layer& layer, size_t tokens) {
    const size_t size = tokens * static_cast<size_t>(layer.pattern.shape().in_features);
    Bytes x(size * ts::size_of(layer.dtype));
    uint32_t state = 1;
    for (size_t i = 0; i < size; ++i) {
        state = state * 1664525u + 1013904223u;
        put_eighths(x.data(), i, static_cast<int32_t>(layer.dtype), static_cast<int>(state >> 28) - 8);
    }
    return x;
}

double median(std::vector<double> times) {
    std::nth_element(times.begin(), times.begin() + kRepetitions / 2, times.end());
    return times[kRepetitions / 2];
}

// A layer, x and y in one kind of memory.
template <class Memory>
class Operands {
  public:
    Operands(const Layer& layer, const Bytes& x, size_t tokens)
        : layer_(layer),
          tokens_(tokens),
          x_(copy(x)),
          values_(copy(layer.values)),
          bias_(copy(layer.bias)),
          metadata_(copy(layer.metadata)),
          scales_(copy(layer.scales)),
          y_(tokens * static_cast<size_t>(layer.pattern.shape().out_features) * ts::size_of(layer.dtype)),
          weights_(layer.pattern.values_size() * ts::size_of(layer.dtype)) {}

    template <class Pattern>
    ts::Product product(const Pattern& pattern) {
        ts::Product product(ts::Op::dds_nt, pattern, static_cast<int64_t>(tokens_));
        product.x(array(x_, layer_.dtype))
            .values(array(values_, layer_.values_dtype))
            .y(array(y_, layer_.dtype));
        if (bias_.size() > 0) product.bias(array(bias_, layer_.dtype));
        if (metadata_.size() > 0) product.metadata(metadata_);
        if (scales_.size() > 0) product.scales(scales_);
        return product;
    }

    // After the product has run.
    Outcome outcome(const ts::Product& product, int32_t kernel, double milliseconds) {
        product.dequantize(array(weights_, layer_.dtype));
        Outcome outcome{ts::kernel_info(kernel).name, Bytes(y_.size()), Bytes(weights_.size()), milliseconds};
        y_.copy_to(outcome.y);
        weights_.copy_to(outcome.weights);
        return outcome;
    }

  private:
    template <class T>
    static ts::Buffer<T, Memory> copy(const std::vector<T>& host) {
        return ts::Buffer<T, Memory>::copy_of(host);
    }
    static ts::Array array(ts::Buffer<char, Memory>& buffer, ts::Dtype dtype) {
        return {static_cast<void*>(buffer.data()), buffer.size() / ts::size_of(dtype), dtype};
    }

    const Layer& layer_;
    size_t tokens_;
    ts::Buffer<char, Memory> x_, values_, bias_;
    ts::Buffer<uint32_t, Memory> metadata_;
    ts::Buffer<float, Memory> scales_;
    ts::Buffer<char, Memory> y_, weights_;
};

Outcome run_on_cpu(const Layer& layer, const Bytes& x, size_t tokens) {
    Operands<ts::HostMemory> operands(layer, x, tokens);
    ts::Product product = operands.product(layer.pattern);
    std::vector<double> times;
    for (int i = 0; i < kRepetitions; ++i) {
        const auto begin = std::chrono::steady_clock::now();
        product.run();
        const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begin;
        times.push_back(time.count());
    }
    return operands.outcome(product, product.select().kernel, median(times));
}

#ifdef WITH_CUDA
bool has_gpu() {
    try {
        ts::device_info(ts::Device::cuda);
        return true;
    } catch (const ts::NoDeviceError& error) {
        std::fprintf(stderr, "on the CPU, since there is no GPU: %s\n", error.what());
        return false;
    }
}

Outcome run_on_gpu(const Layer& layer, const Bytes& x, size_t tokens) {
    const ts::DevicePattern<CudaMemory> pattern(layer.pattern);
    Operands<CudaMemory> operands(layer, x, tokens);
    ts::Product product = operands.product(pattern);
    const ts::Plan<CudaMemory> plan(layer.pattern, product.select().kernel, ts::Op::dds_nt);
    product.plan(plan);
    ts::Buffer<std::byte, CudaMemory> workspace(product.workspace_size());

    cudaEvent_t begin = nullptr, end = nullptr;  // live as long as the program
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    std::vector<double> times;
    for (int i = 0; i < kRepetitions; ++i) {
        check_cuda(cudaEventRecord(begin, nullptr));
        product.run(workspace, nullptr);
        check_cuda(cudaEventRecord(end, nullptr));
        check_cuda(cudaEventSynchronize(end));
        float time = 0;
        check_cuda(cudaEventElapsedTime(&time, begin, end));
        times.push_back(static_cast<double>(time));
    }
    return operands.outcome(product, plan.kernel(), median(times));
}
#endif

// The largest error of y in parts of what is allowed, against sums in float64.
double check(const Layer& layer, const Bytes& x, const Outcome& outcome, size_t tokens) {
    const auto dtype = static_cast<int32_t>(layer.dtype);
    const auto [out_features, in_features] = layer.pattern.shape();
    const auto [bn, bk] = layer.pattern.block_shape();
    const auto row_ptr = layer.pattern.row_ptr(), col_idx = layer.pattern.col_idx();
    const auto rows = static_cast<size_t>(bn), cols = static_cast<size_t>(bk);
    double largest = 0;
    for (size_t t = 0; t < tokens; ++t)
        for (size_t n = 0; n < static_cast<size_t>(out_features); ++n) {
            double sum = layer.bias.empty() ? 0 : get_number(layer.bias.data(), n, dtype),
                   sizes = std::fabs(sum);
            const auto first = static_cast<size_t>(row_ptr[n / rows]),
                       last = static_cast<size_t>(row_ptr[n / rows + 1]);
            for (size_t e = first; e < last; ++e)
                for (size_t k = 0; k < cols; ++k) {
                    const auto slot = static_cast<size_t>(layer.pattern.row_slot()[e]);
                    const size_t column = static_cast<size_t>(col_idx[e]) * cols + k;
                    const double product =
                        get_number(outcome.weights.data(), (slot * rows + n % rows) * cols + k, dtype) *
                        get_number(x.data(), t * static_cast<size_t>(in_features) + column, dtype);
                    sum += product;
                    sizes += std::fabs(product);
                }
            const double y = get_number(outcome.y.data(), t * static_cast<size_t>(out_features) + n, dtype);
            const auto terms = static_cast<int64_t>((last - first) * cols);
            const double error = std::fabs(y - sum) / allowed_error(sum, sizes, terms, dtype);
            if (!(y == sum)) largest = std::isnan(error) ? INFINITY : std::max(largest, error);
        }
    return largest;
}

size_t tokens_of(const std::string& text) {
    size_t tokens = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), tokens);
    if (error != std::errc() || end != text.data() + text.size() || tokens < 1 || tokens > 1 << 20)
        fail("TOKENS must be 1 to 1048576, got " + text);
    return tokens;
}

}  // namespace

int main(int count, char** arguments) {
    if (count < 3 || count > 4) {
        std::fprintf(stderr, "usage: %s FOLDER LAYER [TOKENS]\n", arguments[0]);
        return 2;
    }
    try {
        const size_t tokens = tokens_of(count == 4 ? arguments[3] : "64");
        const Layer layer = read_layer(Checkpoint(arguments[1]), arguments[2]);
        const Bytes x = random_x(layer, tokens);
#ifdef WITH_CUDA
        const bool is_on_gpu = has_gpu();
        const Outcome outcome = is_on_gpu ? run_on_gpu(layer, x, tokens) : run_on_cpu(layer, x, tokens);
#else
        const bool is_on_gpu = false;
        const Outcome outcome = run_on_cpu(layer, x, tokens);
#endif
        const ts_device_info device = ts::device_info(is_on_gpu ? ts::Device::cuda : ts::Device::cpu);
        const double error = check(layer, x, outcome, tokens);
        std::printf("%s (%s), %s: %.4f ms, error %.3f of what is allowed\n", is_on_gpu ? "cuda" : "cpu",
                    device.name, outcome.kernel.c_str(), outcome.milliseconds, error);
        return error <= 1 ? 0 : 1;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "%s: %s\n", arguments[0], error.what());
        return 1;
    }
}
