#include "sums.h"

#include <algorithm>
#include <cstddef>

#include "cpu/vectors.h"
#include "device.h"
#include "error.h"
#include "threads.h"

namespace ts {
namespace {

template <DType kDType>
class HostSums {
    using Codec = cpu::Codec<kDType, 16>;
    using V = typename Codec::V;
    using S = typename Codec::S;
    using Stored = typename Codec::Stored;
    static constexpr int kLanes = cpu::lanes_of<V>;
    static constexpr int kFeatures = 64;  // of a task, at most; the others have 16, 32 or 48
    using Sums = V[kFeatures / kLanes];

  public:
    explicit HostSums(const Problem& problem) : problem_(problem), ld_(problem.y.ld) {}

    void run() const {
        const int64_t features = problem_.pattern.out_features;
        for_each((features + kFeatures - 1) / kFeatures, [&](int64_t i) {
            const int64_t first = i * kFeatures;
            sum_features(first, std::min<int64_t>(kFeatures, features - first));
        });
    }

  private:
    void sum_features(int64_t first, int64_t count) const {
        Sums sums{};
        const auto* y = static_cast<const Stored*>(problem_.y.data);
        if (problem_.y.layout == Layout::row_major) {
            for (int64_t t = 0; t < problem_.tokens; ++t)
                for (int64_t i = 0; i < count; i += kLanes)
                    sums[i / kLanes] += Codec::decode(cpu::load<S>(y + t * ld_ + first + i));
        } else {
            for (int64_t i = 0; i < count; ++i)
                sums[i / kLanes][i % kLanes] = sum_line(y + (first + i) * ld_);
        }
        if (problem_.bias_gradient.dtype == kDType) return store<Codec>(sums, first, count);
        if constexpr (sizeof(Stored) == 2) store<cpu::Codec<DType::float32, 16>>(sums, first, count);
    }

    cpu::element_t<V> sum_line(const Stored* line) const {
        V sums{};
        for (int64_t t = 0; t < problem_.tokens; t += kLanes)
            sums += Codec::decode(cpu::load<S>(line + t, problem_.tokens - t));
        cpu::element_t<V> sum = 0;
        for (int i = 0; i < kLanes; ++i) sum += sums[i];
        return sum;
    }

    template <class Result>
    void store(Sums& sums, int64_t first, int64_t count) const {
        auto* const to = static_cast<typename Result::Stored*>(problem_.bias_gradient.data) + first;
        for (int64_t i = 0; i < count; i += kLanes) {
            V& sum = sums[i / kLanes];
            if (problem_.bias_gradient.accumulate)
                sum += Result::decode(cpu::load<typename Result::S>(to + i));
            cpu::store(to + i, Result::encode(sum));
        }
    }

    const Problem& problem_;
    const int64_t ld_;
};

void sum_on_host(const Problem& problem) {
    switch (problem.input_dtype) {
        case DType::float64:
            return HostSums<DType::float64>(problem).run();
        case DType::float32:
            return HostSums<DType::float32>(problem).run();
        case DType::float16:
            return HostSums<DType::float16>(problem).run();
        default:
            return HostSums<DType::bfloat16>(problem).run();
    }
}

}  // namespace

#ifdef TILESPARSE_CUDA

size_t sums_workspace_size(const Problem& problem, const Device& device) {
    return problem.device == DeviceType::cpu ? 0 : sums::workspace_size(problem, device);
}

void sum_y(const Problem& problem, const Device& device, void* workspace, void* stream) {
    if (problem.device == DeviceType::cpu) return sum_on_host(problem);
    launch_checked("sums", [&] { return sums::sum(problem, device, workspace, stream); });
}

size_t activation_gradient_workspace_size(const ActivationGradient& gradient, const Device& device) {
    return sums::workspace_size(gradient, device);
}

void activation_gradient(const ActivationGradient& gradient, const Device& device, void* workspace,
                         void* stream) {
    launch_checked("activation_gradient",
                   [&] { return sums::activate_backward(gradient, device, workspace, stream); });
}

#else

size_t sums_workspace_size(const Problem&, const Device&) { return 0; }

void sum_y(const Problem& problem, const Device&, void*, void*) { sum_on_host(problem); }

[[noreturn]] void refuse() { fail(TS_NO_DEVICE, "this library was built without CUDA"); }
size_t activation_gradient_workspace_size(const ActivationGradient&, const Device&) { refuse(); }
void activation_gradient(const ActivationGradient&, const Device&, void*, void*) { refuse(); }

#endif

}  // namespace ts
