#include "cpu/packed_values.h"

#include <algorithm>
#include <cstdint>

#include "cpu/memory.h"

namespace ts::cpu {
namespace {

constexpr int64_t kTileBytes = 64;       // of k, in a row of a register
constexpr double kMostPadding = 1.2;     // times the values: reading zeros takes as long as half rows do
constexpr int64_t kHeader = kTileBytes;  // bytes, of which the first four have the depth

// Columns of a block, or all of them, that a step multiplies.
struct Piece {
    int64_t entry;   // of the pattern's rows
    int64_t column;  // of the block, where it begins
    int64_t k;       // where its step begins
    int64_t place;   // in the step
    bool begins;     // a step; or else it is one more piece of the last one
};

// The steps of a weight. Several narrow blocks share one if few of its numbers are zeros then.
class StepList {
  public:
    explicit StepList(const Pattern& pattern) : pattern_(pattern), depth_(kTileBytes) {
        const double padded = static_cast<double>(count() * kTileBytes * pattern_.block_rows);
        if (padded > kMostPadding * static_cast<double>(pattern_.value_count()))
            depth_ = std::min<int64_t>(pattern_.block_cols, kTileBytes);
    }

    int64_t depth() const { return depth_; }
    int64_t width() const { return std::min<int64_t>(pattern_.block_cols, depth_); }  // of a piece

    // Calls visit(piece) for those of a block row.
    template <class Visit>
    void visit(int64_t row, const Visit& visit) const {
        const int64_t side = pattern_.block_cols;
        int64_t last = -1, end = 0;  // step, and what it has been given
        for (int64_t i = pattern_.rows.ptr[row]; i < pattern_.rows.ptr[row + 1]; ++i)
            for (int64_t column = 0; column < side; column += width()) {
                const int64_t begin = pattern_.rows.idx[i] * side + column, k = begin / depth_ * depth_;
                visit(Piece{i, column, k, begin - k, k != last || begin < end});
                last = k;
                end = begin + width();
            }
    }

  private:
    // All block rows count.
    int64_t count() const {
        int64_t steps = 0;
        for (int64_t row = 0; row < pattern_.row_count(); ++row)
            visit(row, [&](const Piece& piece) { steps += piece.begins; });
        return steps;
    }

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
    // At most: steps are only counted when values are packed.
    const int64_t steps = pattern.nnz * (pattern.block_rows / kPanelFeatures) *
                          std::max<int64_t>(pattern.block_cols / kTileBytes, 1);
    const double values = kMostPadding * static_cast<double>(pattern.value_count());
    return index_bytes(panels_of(pattern), steps) + static_cast<size_t>(values);
}

int32_t pack_values(const Problem& problem, void* packed, void*) {
    const Pattern& pattern = problem.pattern;
    const StepList steps(pattern);
    const int64_t rows = pattern.block_rows, depth = steps.depth(), panels = panels_of(pattern);
    *static_cast<int32_t*>(packed) = static_cast<int32_t>(depth);
    auto* const first = reinterpret_cast<int32_t*>(offset(packed, kHeader));
    int32_t *const places = first + panels + 1, *k = places;
    const auto visit = [&](int64_t panel, const auto& visit) {
        steps.visit(panel * kPanelFeatures / rows, visit);
    };
    for (int64_t panel = 0; panel < panels; ++panel) {
        first[panel] = static_cast<int32_t>(k - places);
        visit(panel, [&](const Piece& piece) {
            if (piece.begins) *k++ = static_cast<int32_t>(piece.k);
        });
    }
    first[panels] = static_cast<int32_t>(k - places);
    const int64_t step_bytes = depth * kPanelFeatures;
    auto* next = const_cast<int8_t*>(packed_values(pattern, packed).values);
    for (int64_t panel = 0; panel < panels; ++panel)
        visit(panel, [&](const Piece& piece) {
            if (piece.begins) next = std::fill_n(next, step_bytes, int8_t{0});
            int8_t* const to = next - step_bytes;
            const int64_t row =
                int64_t{pattern.rows.slot[piece.entry]} * rows + panel * kPanelFeatures % rows;
            const auto* const from =
                static_cast<const int8_t*>(problem.values.data) + row * pattern.block_cols + piece.column;
            for (int64_t feature = 0; feature < kPanelFeatures; ++feature)
                for (int64_t i = 0; i < steps.width(); ++i) {
                    const int64_t place = piece.place + i;
                    to[feature / 16 * depth * 16 + place / 4 * kTileBytes + feature % 16 * 4 + place % 4] =
                        from[feature * pattern.block_cols + i];
                }
        });
    return 0;
}

PackedValues packed_values(const Pattern& pattern, const void* packed) {
    const auto* const first = reinterpret_cast<const int32_t*>(offset(packed, kHeader));
    const int64_t panels = panels_of(pattern), steps = first[panels];
    return {*static_cast<const int32_t*>(packed), first, first + panels + 1,
            reinterpret_cast<const int8_t*>(offset(packed, index_bytes(panels, steps)))};
}

}  // namespace ts::cpu
