// y = x W^T for a small batch (decode).
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "threads.h"

namespace ts::cpu {
namespace {

constexpr int64_t kMostTogether = 32;  // k of two vectors

// Puts the k of packed x into the order in which int4 is multiplied.
void reorder_for_int4(float* x, int64_t features, int64_t together) {
    float line[kMostTogether];
    for (int64_t first = 0; first < features; first += together) {
        for (int64_t k = 0; k < together; ++k) line[int4_position(k, together)] = x[first + k];
        std::memcpy(x + first, line, together * sizeof(float));
    }
}

// Forward, to row-major results. Blocks of W are read where they lie, as vectors along k.
class Decode {
  public:
    Decode(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* memory)
        : steps_(steps),
          finish_(finish),
          p_(problem),
          adjacency_(p_.block_rows()),
          rows_(std::min<int64_t>(p_.row_block(), kMaxRows)),
          element_(element_size(p_.input_dtype)),
          result_element_(element_size(p_.result_dtype)),
          tokens_(p_.tokens + (steps_.x_offset ? 1 : 0)),
          packed_element_(steps_.packed_size / steps_.pair),
          is_int4_(p_.values.dtype == DType::int4),
          packs_(tokens_ > 1 || packed_element_ != element_ || p_.input().layout != Layout::row_major ||
                 is_int4_),
          x_ld_(p_.k_size() + kLine / packed_element_),
          threads_(std::min(max_threads(), device.multiprocessors)),
          workspace_(memory) {
        const bool many = ceil_div(p_.features(), kTaskFeatures) >= kThreadTasks * device.multiprocessors;
        task_features_ = many ? kTaskFeatures : rows_;
        x_ = packs_ ? workspace_.take(tokens_ * x_ld_ * packed_element_) : nullptr;
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run() const {
        in_parallel(threads_, [this](Member& member) { run(member); });
    }

    void run(Member& member) const {
        if (packs_) {
            member.share(ceil_div(p_.k_size(), kPackedFeatures), [&](int64_t i) {
                const int64_t feature = i * kPackedFeatures,
                              features = std::min(kPackedFeatures, p_.k_size() - feature);
                pack_rectangle(steps_, p_.input_dtype, p_.input(),
                               {feature, features, 0, p_.tokens, p_.tokens}, true, false,
                               offset(x_, feature * packed_element_), x_ld_);
                for (int64_t token = 0; is_int4_ && token < p_.tokens; ++token)
                    reorder_for_int4(reinterpret_cast<float*>(x_) + token * x_ld_ + feature, features,
                                     std::min<int64_t>(2 * steps_.lanes, p_.pattern.block_cols));
                if (steps_.x_offset)
                    std::memset(offset(x_, p_.tokens * x_ld_ + feature), steps_.x_offset, features);
            });
            member.wait();
        }
        member.draw(ceil_div(p_.features(), task_features_), 1, [&](int64_t i, int64_t) {
            const int64_t feature = i * task_features_;
            compute(feature, std::min(task_features_, p_.features() - feature));
        });
    }

  private:
    static constexpr int64_t kLine = 64;  // bytes, by which lines of x are longer: places of a cache differ

    // Computes as many features from `feature` on.
    void compute(int64_t feature, int64_t features) const {
        alignas(64) std::byte sums[kMostDecodeTokens * kTaskFeatures * sizeof(double)];
        alignas(64) int32_t offsets[kTaskFeatures] = {};
        const Output output = output_of(feature, features, sums, offsets);
        prefetch_output(output, result_element_);
        const int64_t block_rows = p_.pattern.block_rows, block_cols = p_.pattern.block_cols;
        for (int64_t first = 0; first < features; first += rows_) {
            const int64_t row = (feature + first) / block_rows, within = (feature + first) % block_rows;
            const int64_t begin = adjacency_.ptr[row];
            const Values& values = p_.values;
            const int64_t value_bytes =
                within * block_cols * element_size(values.dtype) / values_of_element(values.dtype);
            DecodeTile tile{packs_ ? x_ : p_.input().data,
                            packs_ ? x_ld_ : p_.input().ld,
                            offset(values.data, value_bytes),
                            adjacency_.slot + begin,
                            block_rows * block_cols,
                            adjacency_.idx + begin,
                            adjacency_.ptr[row + 1] - begin,
                            block_cols,
                            rows_,
                            tokens_,
                            offset(sums, first * std::max<int64_t>(element_, sizeof(float))),
                            kTaskFeatures,
                            block_rows - within,
                            within,
                            adjacency_.ptr[p_.features() / block_rows] - begin};
            if (!is_int4_) {
                steps_.multiply_decode(tile);
                continue;
            }
            const bool of_rows = values.scales_per == ScalesPer::row;
            tile.scales = values.scales + (of_rows ? within : 0);
            tile.scale_entry = of_rows ? block_rows : 1;
            tile.scale_row = of_rows ? 1 : 0;
            steps_.multiply_decode_int4(tile);
        }
        if (steps_.x_offset) std::memcpy(offsets, offset(sums, p_.tokens * sizeof offsets), sizeof offsets);
        finish_(output);
    }

    Output output_of(int64_t feature, int64_t features, void* sums, const int32_t* offsets) const {
        const auto at = [&](const void* data) {
            return data ? offset(data, feature * result_element_) : nullptr;
        };
        return {sums,          kTaskFeatures,        p_.tokens,
                features,      at(p_.output().data), p_.output().ld,
                false,         at(p_.bias),          true,
                p_.activation, at(p_.residual.data), p_.residual.ld,
                p_.gated,      p_.gate_activation,   rescale_of(p_, 0, feature, offsets)};
    }

    const Steps& steps_;
    const Finish finish_;
    const Problem& p_;
    const Adjacency adjacency_;
    const int64_t rows_;
    const int64_t element_, result_element_;  // bytes
    const int64_t tokens_;                    // with one of zeros, whose sums are what the offset of x adds
    const int64_t packed_element_;
    const bool is_int4_;
    const bool packs_;    // x, which else is read where it lies
    const int64_t x_ld_;  // once packed
    const int threads_;
    int64_t task_features_;
    Workspace workspace_;
    std::byte* x_;
};

}  // namespace

bool suits_decode(const Steps& steps, const Problem& problem) {
    return problem.forward() && problem.tokens <= steps.decode_tokens &&
           problem.output().layout == Layout::row_major;
}

size_t decode_workspace_size(const Steps& steps, const Problem& problem, const Device& device) {
    return Decode(steps, steps.finish, problem, device, nullptr).workspace_size();
}

void decode(const Steps& steps, Finish finish, const Problem& problem, const Device& device, void* workspace,
            Member* member) {
    const Decode product(steps, finish, problem, device, workspace);
    member != nullptr ? product.run(*member) : product.run();
}

}  // namespace ts::cpu
