// Units and tiles of plans by strips, while they are built.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "common/strip_plan.h"

namespace ts {

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
    Units take(int32_t limit) const {
        return take(UnitSet(64 * static_cast<int64_t>(words_.size())), ~uint64_t{0}, limit);
    }

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

struct StripTile {
    int32_t strips[2];  // the second -1 if both halves use the first
    Units units;
    int32_t first_end;      // units before this one belong to the first half
    int32_t second_begin;   // units from this one on belong to the second
    int32_t second_window;  // where the second half's window begins
    bool swapped = false;   // strips are of x, units of y

    int32_t strip_count() const { return strips[1] < 0 ? 1 : 2; }
    int32_t unit_count() const { return static_cast<int32_t>(units.size()); }
    int32_t features(int32_t unit) const { return kStripFeatures * strip_count() + unit_count() * unit; }
};

}  // namespace ts
