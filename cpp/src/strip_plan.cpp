#include "strip_plan.h"

#include <algorithm>
#include <bit>
#include <map>
#include <numeric>
#include <utility>

namespace ts {
namespace {

using Units = std::vector<int32_t>;

// The units of a strip that are in no tile yet, as bits.
class UnitSet {
  public:
    explicit UnitSet(int64_t size) : words_((size + 63) / 64) {}

    void insert(int32_t unit) { words_[unit / 64] |= uint64_t{1} << unit % 64, ++size_; }
    void erase(int32_t unit) { words_[unit / 64] &= ~(uint64_t{1} << unit % 64), --size_; }
    int32_t size() const { return size_; }

    int32_t count_common(const UnitSet& other) const {
        int32_t count = 0;
        for (size_t w = 0; w < words_.size(); ++w) count += std::popcount(words_[w] & other.words_[w]);
        return count;
    }
    // Up to `limit` units that are also in `other`, or that are not.
    Units take_common(const UnitSet& other, int32_t limit) const { return take(other, 0, limit); }
    Units take_private(const UnitSet& other, int32_t limit) const { return take(other, ~uint64_t{0}, limit); }
    Units take(int32_t limit) const { return take(UnitSet(64 * static_cast<int64_t>(words_.size())), ~uint64_t{0}, limit); }

  private:
    Units take(const UnitSet& other, uint64_t inverse, int32_t limit) const {
        Units units;
        for (size_t w = 0; w < words_.size(); ++w)
            for (uint64_t bits = words_[w] & (other.words_[w] ^ inverse); bits != 0; bits &= bits - 1) {
                if (static_cast<int32_t>(units.size()) == limit) return units;
                units.push_back(static_cast<int32_t>(64 * w) + std::countr_zero(bits));
            }
        return units;
    }

    std::vector<uint64_t> words_;
    int32_t size_ = 0;
};

struct Tile {
    int32_t strips[2];  // the second -1 if both halves use the first
    Units units;
    int32_t first_end;      // units before this one belong to the first half
    int32_t second_begin;   // units from this one on belong to the second
    int32_t second_window;  // where the second half's window begins

    int64_t features(int32_t unit) const {
        return kStripFeatures * (strips[1] < 0 ? 1 : 2) + static_cast<int64_t>(units.size()) * unit;
    }
};

class StripPlanBuilder {
  public:
    explicit StripPlanBuilder(const Pattern& pattern)
        : pattern_(pattern),
          unit_(strip_unit(pattern)),
          window_(kStripWindow / unit_),
          strips_((pattern.out_features + kStripFeatures - 1) / kStripFeatures),
          left_(strips_, UnitSet((pattern.in_features + unit_ - 1) / unit_)),
          slots_(strips_),
          row_parts_(std::max(1, kStripFeatures / pattern.block_rows)),
          col_parts_(std::max(1, unit_ / pattern.block_cols)) {
        for (int32_t strip = 0; strip < strips_; ++strip) find_units(strip);
    }

    StripPlan build() {
        if (pattern_.block_rows > kStripFeatures)
            add_halves_of_blocks();
        else
            add_rows();
        std::stable_sort(tiles_.begin(), tiles_.end(),
                         [&](const Tile& a, const Tile& b) { return a.features(unit_) > b.features(unit_); });
        StripPlan plan{};
        plan.header.tiles = static_cast<int32_t>(tiles_.size());
        plan.header.groups = row_parts_ * col_parts_;
        plan.header.pieces = 2 * window_;
        for (const Tile& tile : tiles_) write(tile, plan);
        return plan;
    }

  private:
    void find_units(int32_t strip) {
        const int32_t feature = strip * kStripFeatures;
        for (int32_t part = 0; part < row_parts_; ++part) {
            const int32_t row = feature / pattern_.block_rows + part;
            if (int64_t{row} * pattern_.block_rows >= pattern_.out_features) break;
            for (int32_t e = pattern_.rows.ptr[row]; e < pattern_.rows.ptr[row + 1]; ++e) {
                const int32_t first = pattern_.rows.idx[e] * pattern_.block_cols;
                for (int32_t k = first; k < first + pattern_.block_cols; k += std::min(unit_, pattern_.block_cols))
                    add_block(strip, k / unit_, part * col_parts_ + k % unit_ / pattern_.block_cols,
                              pattern_.rows.slot[e]);
            }
        }
    }

    void add_block(int32_t strip, int32_t unit, int32_t part, int32_t slot) {
        auto [it, is_new] = slots_[strip].try_emplace(unit, row_parts_ * col_parts_, -1);
        if (is_new) left_[strip].insert(unit);
        it->second[part] = slot;
    }

    // Blocks of two strips: both halves share all units.
    void add_halves_of_blocks() {
        for (int32_t strip = 0; strip < strips_; strip += 2)
            while (left_[strip].size() > 0) add_tile(strip, strip + 1, left_[strip].take(window_), {}, {});
    }

    void add_rows() {
        std::vector<int32_t> order(strips_);
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(),
                         [&](int32_t a, int32_t b) { return left_[a].size() > left_[b].size(); });
        // Two strips cost less than one with twice the units if they share more units than fill a strip.
        for (int32_t common = window_; common > kStripFeatures / unit_; --common)
            for (const int32_t strip : order) add_pairs(strip, common);
        for (int32_t strip = 0; strip < strips_; ++strip)
            while (left_[strip].size() > window_) add_tile(strip, -1, left_[strip].take(2 * window_), {}, {});
        add_rests();
    }

    // Tiles of this strip and others that have `common` or more units in common with it.
    void add_pairs(int32_t strip, int32_t common) {
        while (left_[strip].size() >= window_) {
            int32_t partner = -1, most = common - 1;
            for (int32_t other = 0; other < strips_; ++other) {
                if (other == strip || left_[other].size() < window_) continue;
                const int32_t count = left_[strip].count_common(left_[other]);
                if (count > most) partner = other, most = count;
            }
            if (partner < 0) return;
            const UnitSet &a = left_[strip], &b = left_[partner];
            const Units shared = a.take_common(b, common);
            const int32_t rest = window_ - common;
            add_tile(strip, partner, shared, without(shared, a).take_private(b, rest),
                     without(shared, b).take_private(a, rest));
        }
    }

    static UnitSet without(const Units& units, UnitSet set) {
        for (const int32_t unit : units) set.erase(unit);
        return set;
    }

    // Strips with at most a window of units left, the longest with the shortest.
    void add_rests() {
        std::vector<int32_t> rests;
        for (int32_t strip = 0; strip < strips_; ++strip)
            if (left_[strip].size() > 0) rests.push_back(strip);
        std::stable_sort(rests.begin(), rests.end(),
                         [&](int32_t a, int32_t b) { return left_[a].size() > left_[b].size(); });
        const int32_t limit = (kStripTileFeatures - 2 * kStripFeatures) / unit_;
        for (size_t i = 0, end = rests.size(); i < end; ++i) {
            const UnitSet& first = left_[rests[i]];
            const bool paired = i + 1 < end && first.size() + left_[rests[end - 1]].size() <= limit;
            const int32_t second = paired ? rests[--end] : -1;
            add_tile(rests[i], second, {}, first.take(window_), paired ? left_[second].take(window_) : Units{});
        }
    }

    // For a single strip, both halves' units are `shared`. For two, these lie between those of the
    // first alone and those of the second alone.
    void add_tile(int32_t first, int32_t second, const Units& shared, const Units& of_first, const Units& of_second) {
        Tile tile{{first, second}, of_first, window_, window_, window_};
        tile.units.insert(tile.units.end(), shared.begin(), shared.end());
        if (second >= 0) {
            constexpr int32_t kRoom = kStripTileFeatures - 2 * kStripFeatures;
            tile.first_end = static_cast<int32_t>(tile.units.size());
            tile.second_begin = static_cast<int32_t>(of_first.size());
            tile.second_window = std::min(tile.second_begin, kRoom / unit_ - window_);
        }
        tile.units.insert(tile.units.end(), of_second.begin(), of_second.end());
        for (const int32_t unit : of_first) left_[first].erase(unit);
        for (const int32_t unit : of_second) left_[second].erase(unit);
        for (const int32_t unit : shared) {
            left_[first].erase(unit);
            if (second >= 0) left_[second].erase(unit);
        }
        tiles_.push_back(std::move(tile));
    }

    void write(const Tile& tile, StripPlan& plan) const {
        const int32_t count = static_cast<int32_t>(tile.units.size()), parts = row_parts_ * col_parts_;
        plan.tiles.insert(plan.tiles.end(),
                          {tile.strips[0] * kStripFeatures, tile.strips[1] < 0 ? -1 : tile.strips[1] * kStripFeatures,
                           count, tile.second_window});
        for (int32_t i = 0; i < 2 * window_; ++i) plan.units.push_back(i < count ? tile.units[i] * unit_ : -1);
        for (int32_t half = 0; half < 2; ++half) {
            const auto& slots = slots_[tile.strips[1] < 0 ? tile.strips[0] : tile.strips[half]];
            const int32_t begin = half == 0 ? 0 : tile.second_begin;
            const int32_t end = half == 0 ? std::min(tile.first_end, count) : count;
            for (int32_t i = 0; i < window_; ++i) {
                const int32_t at = half * tile.second_window + i;
                const auto found = begin <= at && at < end ? slots.find(tile.units[at]) : slots.end();
                if (found == slots.end())
                    plan.slots.insert(plan.slots.end(), parts, -1);
                else
                    plan.slots.insert(plan.slots.end(), found->second.begin(), found->second.end());
            }
        }
    }

    const Pattern& pattern_;
    int32_t unit_;
    int32_t window_;  // in units
    int32_t strips_;
    std::vector<UnitSet> left_;
    std::vector<std::map<int32_t, Units>> slots_;  // of each strip: unit to its blocks
    int32_t row_parts_;
    int32_t col_parts_;
    std::vector<Tile> tiles_;
};

}  // namespace

StripPlan build_strip_plan(const Pattern& pattern) { return StripPlanBuilder(pattern).build(); }

}  // namespace ts
