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

constexpr int64_t kPartBytes = 256 << 10;  // of weights, worth the sums of a part
constexpr int64_t kMostParts = 64;

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
        const auto floats = [&](int64_t count) {
            return reinterpret_cast<float*>(workspace_.take(count * sizeof(float)));
        };
        x_ = floats(p_.tokens * p_.k_size());
        const int64_t listed = inputs_ ? p_.k_size() : p_.features();
        on_ = reinterpret_cast<uint8_t*>(workspace_.take(listed));
        counts_ = reinterpret_cast<int32_t*>(workspace_.take(listed / kMinRows * sizeof(int32_t)));
        if (!inputs_) {
            gate_ = workspace_.take(p_.tokens * listed * element_);
            return;
        }
        listed_x_ = floats(p_.tokens * listed);
        const Pattern& pattern = p_.pattern;
        columns_ = p_.k_size() / p_.k_block();
        parts_ = std::clamp<int64_t>(p_.values.bytes(pattern) / kPartBytes, 1,
                                     std::clamp<int64_t>(columns_, 1, kMostParts));
        is_whole_ = !is_quantized(p_.values.dtype) && pattern.nnz == columns_ * pattern.row_count();
        sums_ = floats(parts_ * p_.tokens * p_.features());
        if (!is_whole_) lines_ = floats(parts_ * p_.tokens * p_.features());
    }

    size_t workspace_size() const { return workspace_.size(); }

    void run(const Device& device) const {
        in_parallel(std::min(max_threads(), device.multiprocessors), [this](Member& member) {
            const int64_t columns = p_.k_size() / p_.k_block(), tasks = p_.features() / width_;
            member.share(columns, [&](int64_t column) { take_x(column * p_.k_block()); });
            if (!inputs_) member.share(tasks, [&](int64_t task) { list_outputs(task * width_); });
            member.wait();
            if (inputs_) member.draw(parts_, 1, [&](int64_t part, int64_t) { add_columns(part); });
            member.draw(tasks, 1, [&](int64_t task, int64_t) {
                inputs_ ? add_parts(task * width_) : compute(task * width_);
            });
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

    // Adds what some columns of blocks give to all features. The weights of a neuron lie together.
    void add_columns(int64_t part) const {
        const int64_t features = p_.features(), rows = p_.row_block(), k_block = p_.k_block();
        float* const sums = sums_ + part * p_.tokens * features;
        std::fill_n(sums, p_.tokens * features, 0.0f);
        float* const line = is_whole_ ? sums : lines_ + part * p_.tokens * features;
        for (int64_t c = columns_ * part / parts_; c < columns_ * (part + 1) / parts_; ++c) {
            const int32_t* const ptr = p_.pattern.cols.ptr + c;
            const int64_t k = c * k_block, length = (ptr[1] - ptr[0]) * rows, count = counts_[k / kMinRows];
            if (length == 0 || count == 0) continue;
            const int64_t ld = is_whole_ ? features : length;
            if (!is_whole_) std::fill_n(line, p_.tokens * length, 0.0f);
            of_values_.skip_inputs({offset(p_.values.data, ptr[0] * rows * k_block * value_element_), length,
                                    on_ + k, count, listed_x_ + k * p_.tokens, p_.tokens, line, ld});
            if (is_whole_) continue;
            for (int64_t t = 0; t < p_.tokens; ++t)
                for (int64_t e = ptr[0]; e < ptr[1]; ++e)
                    add_block(e, line + t * length + (e - ptr[0]) * rows, sums + t * features);
        }
    }

    // Adds the sums of a block, times its scales, to those of its features.
    void add_block(int64_t entry, const float* from, float* sums) const {
        const int64_t rows = p_.row_block(), slot = p_.pattern.cols.slot[entry];
        float* const to = sums + p_.pattern.cols.idx[entry] * rows;
        if (!is_quantized(p_.values.dtype)) {
            for (int64_t i = 0; i < rows; ++i) to[i] += from[i];
        } else if (p_.values.scales_per == ScalesPer::row) {
            for (int64_t i = 0; i < rows; ++i) to[i] += from[i] * p_.values.scales[slot * rows + i];
        } else {
            for (int64_t i = 0; i < rows; ++i) to[i] += from[i] * p_.values.scales[slot];
        }
    }

    void add_parts(int64_t feature) const {
        alignas(64) float sums[kMostSkipTokens * kTaskFeatures] = {};
        for (int64_t part = 0; part < parts_; ++part)
            for (int64_t t = 0; t < p_.tokens; ++t) {
                const float* const from = sums_ + (part * p_.tokens + t) * p_.features() + feature;
                for (int64_t i = 0; i < width_; ++i) sums[t * kTaskFeatures + i] += from[i];
            }
        finish(feature, sums);
    }

    void compute(int64_t feature) const {
        alignas(64) float sums[kMostSkipTokens * kTaskFeatures] = {};
        const int64_t row_block = p_.row_block(), k_block = p_.k_block();
        const int64_t row = feature / row_block, within = feature % row_block;
        const Adjacency& rows = p_.block_rows();
        const int64_t begin = rows.ptr[row];
        const bool scaled = is_quantized(p_.values.dtype), of_rows = p_.values.scales_per == ScalesPer::row;
        of_values_.skip_outputs({offset(p_.values.data, within * k_block * value_element_), rows.slot + begin,
                                 rows.idx + begin, rows.ptr[row + 1] - begin, row_block, k_block, x_,
                                 p_.k_size(), on_ + feature, counts_[feature / kMinRows], p_.tokens,
                                 scaled ? p_.values.scales + (of_rows ? within : 0) : nullptr,
                                 of_rows ? row_block : 1, of_rows, sums});
        finish(feature, sums);
    }

    void finish(int64_t feature, float* sums) const {
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
    int64_t columns_ = 0;        // of blocks
    int64_t parts_ = 0;       // of these, whatever the number of threads, so that results do not depend on it
    bool is_whole_ = false;   // weights of a neuron are those of all features, without scales
    float* sums_ = nullptr;   // [parts, tokens, features]
    float* lines_ = nullptr;  // [parts, tokens, features]: sums of a column, in the order of its blocks
    std::byte* gate_ = nullptr;  // [tokens, features]
};

// The product of some tokens of a group, as one of a single weight.
Problem of_group(const Problem& problem, int64_t group, int64_t token, int64_t tokens) {
    Problem own = problem;
    Pattern& pattern = own.pattern;
    const int64_t features = pattern.group_out_features(), size = element_size(problem.input_dtype);
    own.offsets = nullptr;
    own.tokens = tokens;
    pattern.cols.ptr += group * pattern.col_count();
    pattern.groups = 1;
    pattern.out_features = features;
    pattern.nnz = pattern.cols.ptr[pattern.col_count()] - pattern.cols.ptr[0];
    for (Matrix* matrix : {&own.x, &own.y, &own.residual})
        if (matrix->data != nullptr) matrix->data = offset(matrix->data, token * matrix->ld * size);
    if (own.bias != nullptr) own.bias = offset(own.bias, group * features * size);
    return own;
}

}  // namespace

size_t skip_workspace_size(const Problem& problem) {
    if (!problem.grouped()) return SkippingProduct(problem, nullptr).workspace_size();
    // As for a group that has all blocks, since the host may not know the arrays yet.
    Problem own = problem;
    own.pattern.groups = 1;
    own.pattern.out_features = problem.pattern.group_out_features();
    const int64_t blocks = own.pattern.row_count() * own.pattern.col_count();
    own.pattern.nnz = is_quantized(own.values.dtype) ? blocks : blocks - 1;  // all of them need less
    own.tokens = std::min<int64_t>(problem.tokens, kMostSkipTokens);
    return SkippingProduct(own, nullptr).workspace_size();
}

void skip(const Problem& problem, const Device& device, void* workspace) {
    if (!problem.grouped()) return SkippingProduct(problem, workspace).run(device);
    for (int64_t group = 0; group < problem.pattern.groups; ++group) {
        const int64_t end = problem.offsets[group + 1];
        for (int64_t token = problem.offsets[group]; token < end; token += kMostSkipTokens) {
            const int64_t tokens = std::min<int64_t>(kMostSkipTokens, end - token);
            const Problem own = of_group(problem, group, token, tokens);
            SkippingProduct(own, workspace).run(device);
        }
    }
}

}  // namespace ts::cpu
