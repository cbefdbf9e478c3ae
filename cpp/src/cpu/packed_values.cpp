#include "cpu/packed_values.h"

#include <algorithm>
#include <cstdint>

#include "cpu/memory.h"

namespace ts::cpu {
namespace {

constexpr int64_t kTileBytes = 64;        // of k, in a row of a register
constexpr double kMostPadding = 1.6;      // times the values, where steps of whole rows are worth their zeros
constexpr int64_t kHeader = kTileBytes;   // bytes, of which the first four have the depth

// The steps of the weight of a product.
class Steps64 {
  public:
    explicit Steps64(const Problem& problem) : pattern_(problem.pattern) {
        const int64_t side = pattern_.block_cols;
        depth_ = std::min(side, kTileBytes);
        if (side >= kTileBytes || pattern_.nnz == 0) return;
        depth_ = kTileBytes;
        const double padded = static_cast<double>(count_all() * kTileBytes);
        if (padded > kMostPadding * static_cast<double>(pattern_.nnz * side)) depth_ = side;
    }

    int64_t depth() const { return depth_; }

    // Calls visit(k) for the steps of a block row, in order.
    template <class Visit>
    void visit(int64_t row, const Visit& visit) const {
        int64_t next = 0;
        for (int64_t i = pattern_.rows.ptr[row]; i < pattern_.rows.ptr[row + 1]; ++i) {
            const int64_t begin = int64_t{pattern_.rows.idx[i]} * pattern_.block_cols;
            for (int64_t k = std::max(begin / depth_ * depth_, next); k < begin + pattern_.block_cols;
                 k += depth_)
                visit(k), next = k + depth_;
        }
    }

    int64_t count(int64_t row) const {
        int64_t steps = 0;
        visit(row, [&](int64_t) { ++steps; });
        return steps;
    }

    // Of all block rows.
    int64_t count_all() const {
        int64_t steps = 0;
        for (int64_t row = 0; row < pattern_.row_count(); ++row) steps += count(row);
        return steps;
    }

  private:
    const Pattern& pattern_;
    int64_t depth_;
};

int64_t panels_of(const Pattern& pattern) { return pattern.out_features / kPanelFeatures; }

int64_t index_bytes(int64_t panels, int64_t steps) {
    return kHeader + round_up((panels + 1 + steps) * static_cast<int64_t>(sizeof(int32_t)), kTileBytes);
}

}  // namespace

size_t packed_values_size(const Problem& problem) {
    const Pattern& pattern = problem.pattern;
    if (!problem.forward() || !pattern.is_regular() || pattern.block_rows % kPanelFeatures != 0) return 0;
    const Steps64 steps(problem);
    const int64_t count = steps.count_all() * (pattern.block_rows / kPanelFeatures);
    return index_bytes(panels_of(pattern), count) + count * steps.depth() * kPanelFeatures;
}

int32_t pack_values(const Problem& problem, void* packed, void*) {
    const Pattern& pattern = problem.pattern;
    const Steps64 steps(problem);
    const int64_t rows = pattern.block_rows, cols = pattern.block_cols, depth = steps.depth();
    auto* const header = static_cast<int32_t*>(packed);
    auto* const first = reinterpret_cast<int32_t*>(offset(packed, kHeader));
    *header = static_cast<int32_t>(depth);
    const int64_t panels = panels_of(pattern);
    first[0] = 0;
    int32_t* k_of = first + panels + 1;
    for (int64_t panel = 0; panel < panels; ++panel) {
        steps.visit(panel * kPanelFeatures / rows, [&](int64_t k) { *k_of++ = static_cast<int32_t>(k); });
        first[panel + 1] = static_cast<int32_t>(k_of - first - panels - 1);
    }
    const PackedValues all = packed_values(pattern, packed);
    auto* const values = const_cast<int8_t*>(all.values);
    std::fill_n(values, first[panels] * depth * kPanelFeatures, int8_t{0});
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t row = panel * kPanelFeatures / rows, within = panel * kPanelFeatures % rows;
        int64_t step = first[panel];
        for (int64_t i = pattern.rows.ptr[row]; i < pattern.rows.ptr[row + 1]; ++i) {
            const auto* const from = static_cast<const int8_t*>(problem.values.data) +
                                     (pattern.rows.slot[i] * rows + within) * cols;
            for (int64_t col = 0; col < cols; ++col) {
                const int64_t k = pattern.rows.idx[i] * cols + col;
                while (k >= all.k[step] + depth) ++step;
                const int64_t d = k - all.k[step];
                int8_t* const to = values + step * depth * kPanelFeatures + d / 4 * kTileBytes + d % 4;
                for (int64_t feature = 0; feature < kPanelFeatures; ++feature)
                    to[feature / 16 * depth * 16 + feature % 16 * 4] = from[feature * cols + col];
            }
        }
    }
    return 0;
}

PackedValues packed_values(const Pattern& pattern, const void* packed) {
    const auto* const first = reinterpret_cast<const int32_t*>(offset(packed, kHeader));
    const int64_t panels = panels_of(pattern), steps = first[panels];
    return {*static_cast<const int32_t*>(packed), first, first + panels + 1,
            reinterpret_cast<const int8_t*>(offset(packed, index_bytes(panels, steps)))};
}

}  // namespace ts::cpu
