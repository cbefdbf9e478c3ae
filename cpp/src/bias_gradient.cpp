#include "bias_gradient.h"

#include <algorithm>
#include <cstddef>

#include "cpu/vectors.h"
#include "device.h"
#include "error.h"
#include "threads.h"

namespace ts {
namespace {

// y [tokens, features] and where its sums over tokens go.
struct Summed {
    Matrix y;
    int64_t tokens, features;
    BiasGradient to;
};

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
    explicit HostSums(const Summed& summed) : summed_(summed), ld_(summed.y.ld) {}

    static int64_t tasks(int64_t features) { return (features + kFeatures - 1) / kFeatures; }

    void run(int64_t task) const {
        const int64_t first = task * kFeatures;
        sum_features(first, std::min<int64_t>(kFeatures, summed_.features - first));
    }

  private:
    void sum_features(int64_t first, int64_t count) const {
        Sums sums{};
        const auto* y = static_cast<const Stored*>(summed_.y.data);
        if (summed_.y.layout == Layout::row_major) {
            for (int64_t t = 0; t < summed_.tokens; ++t)
                for (int64_t i = 0; i < count; i += kLanes)
                    sums[i / kLanes] += Codec::decode(cpu::load<S>(y + t * ld_ + first + i));
        } else {
            for (int64_t i = 0; i < count; ++i)
                sums[i / kLanes][i % kLanes] = sum_line(y + (first + i) * ld_);
        }
        if (summed_.to.dtype == kDType) return store<Codec>(sums, first, count);
        if constexpr (sizeof(Stored) == 2) store<cpu::Codec<DType::float32, 16>>(sums, first, count);
    }

    cpu::element_t<V> sum_line(const Stored* line) const {
        V sums{};
        for (int64_t t = 0; t < summed_.tokens; t += kLanes)
            sums += Codec::decode(cpu::load<S>(line + t, summed_.tokens - t));
        cpu::element_t<V> sum = 0;
        for (int i = 0; i < kLanes; ++i) sum += sums[i];
        return sum;
    }

    template <class Result>
    void store(Sums& sums, int64_t first, int64_t count) const {
        auto* const to = static_cast<typename Result::Stored*>(summed_.to.data) + first;
        for (int64_t i = 0; i < count; i += kLanes) {
            V& sum = sums[i / kLanes];
            if (summed_.to.accumulate) sum += Result::decode(cpu::load<typename Result::S>(to + i));
            cpu::store(to + i, Result::encode(sum));
        }
    }

    const Summed summed_;
    const int64_t ld_;
};

// Calls visit(sums of that dtype, not yet of anything).
template <class Visit>
void with_dtype(DType dtype, const Visit& visit) {
    switch (dtype) {
        case DType::float64:
            return visit.template operator()<HostSums<DType::float64>>();
        case DType::float32:
            return visit.template operator()<HostSums<DType::float32>>();
        case DType::float16:
            return visit.template operator()<HostSums<DType::float16>>();
        default:
            return visit.template operator()<HostSums<DType::bfloat16>>();
    }
}

void sum_on_host(const Problem& problem) {
    const int64_t features = problem.pattern.out_features;
    with_dtype(problem.input_dtype, [&]<class Sums>() {
        const Sums sums({problem.y, problem.tokens, features, problem.bias_gradient});
        for_each(Sums::tasks(features), [&](int64_t task) { sums.run(task); });
    });
}

// The sums of one group.
Summed group_of(const GroupSums& of, int64_t group) {
    const int64_t first = of.offsets[group];
    auto* const y = static_cast<std::byte*>(of.y.data) + first * of.y.ld * element_size(of.dtype);
    auto* const to = static_cast<std::byte*>(of.sums) + group * of.features * element_size(of.result_dtype);
    return {{y, of.y.ld, Layout::row_major},
            of.offsets[group + 1] - first,
            of.features,
            {to, of.result_dtype, false}};
}

void sum_groups_on_host(const GroupSums& of) {
    with_dtype(of.dtype, [&]<class Sums>() {
        const int64_t tasks = Sums::tasks(of.features);
        for_each(of.groups * tasks, [&](int64_t i) { Sums(group_of(of, i / tasks)).run(i % tasks); });
    });
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

void sum_groups(const GroupSums& of, void* stream) {
    if (of.device == DeviceType::cpu) return sum_groups_on_host(of);
    cuda_device(-1);  // or why there is none
    launch_checked("group_sums", [&] { return group_sums::run(of, stream); });
}

#else

size_t sums_workspace_size(const Problem&, const Device&) { return 0; }

void sum_y(const Problem& problem, const Device&, void*, void*) { sum_on_host(problem); }

size_t activation_gradient_workspace_size(const ActivationGradient&, const Device&) { fail_without_cuda(); }
void activation_gradient(const ActivationGradient&, const Device&, void*, void*) { fail_without_cuda(); }
void sum_groups(const GroupSums& of, void*) {
    if (of.device != DeviceType::cpu) fail_without_cuda();
    sum_groups_on_host(of);
}

#endif

}  // namespace ts
