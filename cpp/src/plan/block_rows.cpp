#include "plan/block_rows.h"

#include <algorithm>
#include <bit>
#include <cstddef>
#include <numeric>
#include <utility>

#include "descriptors.h"

namespace ts {
namespace {

// Columns of block rows as bits, to compare rows quickly.
class ColumnSets {
  public:
    explicit ColumnSets(const View& view)
        : words_((view.col_count + 63) / 64), bits_(view.row_count * words_) {
        for (int64_t row = 0; row < view.row_count; ++row)
            for (int32_t e = view.rows.ptr[row]; e < view.rows.ptr[row + 1]; ++e)
                bits_[row * words_ + view.rows.idx[e] / 64] |= uint64_t{1} << view.rows.idx[e] % 64;
    }

    std::vector<uint64_t> empty_set() const { return std::vector<uint64_t>(words_); }
    std::vector<uint64_t> set_of(int32_t row) const {
        return {bits_.begin() + row * words_, bits_.begin() + (row + 1) * words_};
    }
    void add(int32_t row, std::vector<uint64_t>& set) const {
        for (int64_t w = 0; w < words_; ++w) set[w] |= bits_[row * words_ + w];
    }
    int32_t overlap(const std::vector<uint64_t>& a, const std::vector<uint64_t>& b) const {
        int32_t both = 0;
        for (int64_t w = 0; w < words_; ++w) both += std::popcount(a[w] & b[w]);
        return both;
    }
    // |row and set| / |row or set|; two empty sets are alike.
    double similarity(int32_t row, const std::vector<uint64_t>& set) const {
        int64_t both = 0, either = 0;
        for (int64_t w = 0; w < words_; ++w) {
            both += std::popcount(bits_[row * words_ + w] & set[w]);
            either += std::popcount(bits_[row * words_ + w] | set[w]);
        }
        return either == 0 ? 1.0 : static_cast<double>(both) / static_cast<double>(either);
    }

  private:
    int64_t words_;
    std::vector<uint64_t> bits_;
};

// Pairs the groups that share most columns, greedily; one that is left over stays alone. A pair is the
// first group's places, then the second's.
std::vector<Group> pair_groups(const ColumnSets& sets, const std::vector<Group>& groups) {
    std::vector<std::vector<uint64_t>> columns;
    for (const Group& group : groups) {
        columns.push_back(sets.empty_set());
        for (const int32_t row : group)
            if (row >= 0) sets.add(row, columns.back());
    }
    std::vector<Candidate> candidates;
    const auto count = static_cast<int32_t>(groups.size());
    for (int32_t i = 0; i < count; ++i)
        for (int32_t j = i + 1; j < count; ++j)
            candidates.push_back({sets.overlap(columns[i], columns[j]), i, j});
    std::stable_sort(candidates.begin(), candidates.end(),
                     [](const Candidate& a, const Candidate& b) { return a.overlap > b.overlap; });
    std::vector<bool> taken(groups.size());
    std::vector<Group> pairs;
    for (const auto& [overlap, first, second] : candidates) {
        if (taken[first] || taken[second]) continue;
        taken[first] = taken[second] = true;
        pairs.push_back(groups[first]);
        pairs.back().insert(pairs.back().end(), groups[second].begin(), groups[second].end());
    }
    for (size_t i = 0; i < groups.size(); ++i) {
        if (taken[i]) continue;
        pairs.push_back(groups[i]);
        pairs.back().resize(2 * groups[i].size(), -1);
    }
    return pairs;
}

std::vector<Group> group_alike_of_one(const View& view, int32_t size) {
    std::vector<int32_t> order(view.row_count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return view.length(a) > view.length(b); });
    std::vector<Group> groups;
    if (size == 1) {
        for (const int32_t row : order) groups.push_back({row});
        return groups;
    }
    const ColumnSets sets(view);
    while (!order.empty()) {
        Group group{order.front()};
        order.erase(order.begin());
        std::vector<uint64_t> columns = sets.set_of(group[0]);
        while (static_cast<int32_t>(group.size()) < size && !order.empty()) {
            auto best = order.begin();
            double best_similarity = -1;
            for (auto it = order.begin(); it != order.end(); ++it) {
                const double similarity = sets.similarity(*it, columns);
                if (similarity > best_similarity) best = it, best_similarity = similarity;
            }
            group.push_back(*best);
            sets.add(*best, columns);
            order.erase(best);
        }
        std::sort(group.begin(), group.end());
        groups.push_back(std::move(group));
    }
    return groups;
}

std::vector<Group> pair_rows_of_one(const View& view, int32_t size) {
    std::vector<Group> groups(view.row_count);
    for (int32_t row = 0; row < view.row_count; ++row) groups[row] = {row};
    const ColumnSets sets(view);
    for (int32_t paired = 1; paired < size; paired *= 2) groups = pair_groups(sets, groups);
    return groups;
}

// Calls a way of grouping rows for each weight.
template <class Grouping>
std::vector<Group> group_each(const View& view, int32_t size, Grouping group_one) {
    const int64_t rows = view.weight_rows();
    std::vector<Group> all;
    for (int64_t first = 0; first < view.row_count; first += rows) {
        View one = view;
        one.rows.ptr += first;
        one.row_count = rows;
        one.weights = 1;
        for (Group& group : group_one(one, size)) {
            for (int32_t& row : group)
                if (row >= 0) row += static_cast<int32_t>(first);
            all.push_back(std::move(group));
        }
    }
    return all;
}

}  // namespace

View view_of(const Pattern& pattern, Op op) {
    const int64_t rows = block_row_count(pattern), cols = block_col_count(pattern);
    const int32_t weights = pattern.groups;
    if (op == Op::dds_nn)
        return {pattern.cols,       weights * cols,     rows / weights,
                pattern.block_cols, pattern.block_rows, weights};
    return {pattern.rows, rows, cols, pattern.block_rows, pattern.block_cols, weights};
}

std::vector<Group> group_alike(const View& view, int32_t size) {
    return group_each(view, size, group_alike_of_one);
}

std::vector<Group> pair_rows(const View& view, int32_t size) {
    return group_each(view, size, pair_rows_of_one);
}

std::vector<Column> columns_of(const View& view, const Group& group, int32_t size) {
    std::vector<std::pair<int32_t, std::pair<int32_t, int32_t>>> entries;  // column, (place, slot)
    for (size_t i = 0; i < group.size(); ++i) {
        if (group[i] < 0) continue;
        for (int32_t e = view.rows.ptr[group[i]]; e < view.rows.ptr[group[i] + 1]; ++e)
            entries.push_back({view.rows.idx[e], {static_cast<int32_t>(i), view.rows.slot[e]}});
    }
    std::sort(entries.begin(), entries.end());
    std::vector<Column> columns;
    for (const auto& [col, block] : entries) {
        if (columns.empty() || columns.back().col != col)
            columns.push_back({col, std::vector<int32_t>(size, -1)});
        columns.back().slots[block.first] = block.second;
    }
    return columns;
}

}  // namespace ts
