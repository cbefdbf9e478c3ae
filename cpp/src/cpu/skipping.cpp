// y = x W^T for a small batch of neurons most of which are off. See steps.h for what is multiplied.
#include "cpu/skipping.h"

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "cpu/steps.h"
#include "threads.h"

namespace ts::cpu {
namespace {

class SkippingProduct {
  public:
    SkippingProduct(const Problem& problem, void* memory)
        : p_(problem),
          of_x_(widest().steps[static_cast<int>(problem.input_dtype)]),
          of_values_(widest().steps[static_cast<int>(problem.values.dtype)]),
          inputs_(p_.skip == Skip::inputs),
          element_(element_size(p_.input_dtype)),
          value_element_(element_size(p_.values.dtype)),
          width_(std::min<int64_t>(p_.row_block(), kTaskFeatures)),
          threshold_(std::min(p_.threshold, FLT_MAX)),
          workspace_(memory) {
        x_ = reinterpret_cast<float*>(workspace_.take(p_.tokens * p_.k_size() * sizeof(float)));
        const int64_t listed = inputs_ ? p_.k_size() : p_.features();
        on_ = reinterpret_cast<uint8_t*>(workspace_.take(listed));
        counts_ = reinterpret_cast<int32_t*>(workspace_.take(listed / kMinRows * sizeof(int32_t)));
        if (inputs_)
            listed_x_ = reinterpret_cast<float*>(workspace_.take(p_.tokens * listed * sizeof(float)));
        else
            gate_ = workspace_.take(p_.tokens * listed * element_);
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run(const Device& device) const {
        in_parallel(std::min(max_threads(), device.multiprocessors), [this](Member& member) {
            const int64_t columns = p_.k_size() / p_.k_block(), tasks = p_.features() / width_;
            member.share(columns, [&](int64_t column) { take_x(column * p_.k_block()); });
            if (!inputs_) member.share(tasks, [&](int64_t task) { list_outputs(task * width_); });
            member.wait();
            member.draw(tasks, 1, [&](int64_t task, int64_t) { compute(task * width_); });
        });
    }

  private:
    bool is_off(float x) const { return std::fabs(x) <= threshold_; }

    void to_floats(const Matrix& from, int64_t feature, int64_t features, float* to, int64_t ld) const {
        pack_rectangle(of_x_, p_.input_dtype, from, {feature, features, 0, p_.tokens, p_.tokens}, true, false,
                       to, ld);
    }

    // Takes the x of a column of blocks; of `inputs` lists those that are on for any token.
    void take_x(int64_t k) const {
        const int64_t size = p_.k_block(), ld = p_.k_size();
        to_floats(p_.x, k, size, x_ + k, ld);
        if (!inputs_) return;
        int32_t count = 0;
        float* to = listed_x_ + k * p_.tokens;
        for (int64_t i = 0; i < size; ++i) {
            bool is_on = false;
            for (int64_t t = 0; t < p_.tokens; ++t) {
                const float x = x_[t * ld + k + i];
                const bool off = is_off(x);
                to[t] = off ? 0.0f : x;
                is_on |= !off;
            }
            on_[k + count] = static_cast<uint8_t>(i);
            if (is_on) ++count, to += p_.tokens;
        }
        counts_[k / kMinRows] = count;
    }

    // Lists the features of a task that are on for any token, and copies their gates, with zeros for others.
    void list_outputs(int64_t feature) const {
        float gates[kMostSkipTokens * kTaskFeatures];
        to_floats(p_.residual, feature, width_, gates, width_);
        int32_t count = 0;
        for (int64_t t = 0; t < p_.tokens; ++t)
            std::memcpy(gate_at(t, feature),
                        offset(p_.residual.data, (t * p_.residual.ld + feature) * element_),
                        width_ * element_);
        for (int64_t i = 0; i < width_; ++i) {
            bool is_on = false;
            for (int64_t t = 0; t < p_.tokens; ++t) {
                const bool off = is_off(gates[t * width_ + i]);
                if (off) std::memset(gate_at(t, feature + i), 0, element_);
                is_on |= !off;
            }
            on_[feature + count] = static_cast<uint8_t>(i);
            if (is_on) ++count;
        }
        counts_[feature / kMinRows] = count;
    }

    std::byte* gate_at(int64_t token, int64_t feature) const {
        return gate_ + (token * p_.features() + feature) * element_;
    }

    void compute(int64_t feature) const {
        alignas(64) float sums[kMostSkipTokens * kTaskFeatures] = {};
        const int64_t row_block = p_.row_block(), k_block = p_.k_block();
        const int64_t row = feature / row_block, within = feature % row_block;
        const Adjacency& rows = p_.block_rows();
        const int64_t begin = rows.ptr[row];
        const bool scaled = is_quantized(p_.values.dtype), of_rows = p_.values.scales_per == ScalesPer::row;
        const SkipTile tile{offset(p_.values.data, within * (inputs_ ? 1 : k_block) * value_element_),
                            rows.slot + begin,
                            rows.idx + begin,
                            rows.ptr[row + 1] - begin,
                            row_block,
                            k_block,
                            inputs_ ? listed_x_ : x_,
                            p_.k_size(),
                            on_ + (inputs_ ? 0 : feature),
                            counts_ + (inputs_ ? 0 : feature / kMinRows),
                            width_,
                            p_.tokens,
                            scaled ? p_.values.scales + (of_rows ? within : 0) : nullptr,
                            of_rows ? row_block : 1,
                            of_rows,
                            sums};
        (inputs_ ? of_values_.skip_inputs : of_values_.skip_outputs)(tile);
        const auto at = [&](const void* data) { return data ? offset(data, feature * element_) : nullptr; };
        of_x_.finish({sums,
                      kTaskFeatures,
                      p_.tokens,
                      width_,
                      at(p_.y.data),
                      p_.y.ld,
                      false,
                      at(p_.bias),
                      true,
                      p_.activation,
                      inputs_ ? at(p_.residual.data) : gate_at(0, feature),
                      inputs_ ? p_.residual.ld : p_.features(),
                      p_.gated,
                      p_.gate_activation,
                      {}});
    }

    const Problem& p_;
    const Steps &of_x_, &of_values_;
    const bool inputs_;
    const int64_t element_, value_element_;  // bytes
    const int64_t width_;                    // features of a task
    const float threshold_;
    Workspace workspace_;
    float* x_;                   // [tokens, k]
    uint8_t* on_;                // in each block (task) the k (features) that are on, first of all
    int32_t* counts_;            // of these, at the number of the block's (task's) first 16
    float* listed_x_ = nullptr;  // in each block of k [on, tokens]
    std::byte* gate_ = nullptr;  // [tokens, features]
};

}  // namespace

size_t skip_workspace_size(const Problem& problem) {
    return SkippingProduct(problem, nullptr).workspace_size();
}

void skip(const Problem& problem, const Device& device, void* workspace) {
    SkippingProduct(problem, workspace).run(device);
}

}  // namespace ts::cpu
