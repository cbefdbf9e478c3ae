// Constants that follow from the tile of a decode kernel.
#pragma once

#include "sm80/decode_weight.cuh"

namespace ts::sm80 {

// `Weight`: its format, see decode_weight.cuh.
template <class Math_, class Weight_, int kTokenTiles_>
struct DecodeTraits {
    using Math = Math_;
    using Input = typename Math::Input;
    using Accumulator = typename Math::Accumulator;
    using Result = typename Math::Result;
    using Weight = Weight_;
    static constexpr int kRows = Weight::kRows;
    static constexpr int kTokenTiles = kTokenTiles_;  // of 8 tokens
    static constexpr int kTokens = 8 * kTokenTiles;
    static constexpr int kSlice = Weight::kSlice;         // elements of k
    static constexpr int kChunks = Weight::kBlockChunks;  // of 16 bytes, of a block's k in a slice
    static constexpr int kBlocks = kSlice / 8 / kChunks;  // of a slice

    // The warps of a team of four multiply different halves of each slice, and all different rows or tokens.
    static constexpr int kTeam = kTokenTiles == 8 && kRows >= 32 ? 4 : kRows == 64 ? 2 : 1;
    static constexpr int kHalves = kTeam == 4 ? 2 : 1;
    static constexpr int kWarpRows = kRows > 32 ? 32 : kRows;
    static constexpr int kRowWarps = kRows / kWarpRows;
    static constexpr int kWarpTokens = kTokens * kRowWarps * kHalves / kTeam;
    static constexpr int kWarpRowTiles = kWarpRows / 16;
    static constexpr int kWarpTokenTiles = kWarpTokens / 8;

    // A stage has the weight of a slice, and of each of its blocks [kTokens][8 * kChunks of k].
    using Lines = typename Weight::template Lines<32 * kTeam>;  // of tokens
    static constexpr int kStageBytes = Weight::kBytes + kTokens * kSlice * static_cast<int>(sizeof(Input));
    // Many short rings in a multiprocessor are better than few long ones (measured on an H200).
    static constexpr int kStages = kTeam > 1 || (kStageBytes <= 4096 && !Weight::kFewBytes) ? 3 : 2;
    static constexpr int kRingBytes = kStages * kStageBytes;
    // Sums are [kTokens][kSumLine], of which kRows are used.
    static constexpr int kSumLine = kRows + 4;              // of a token; the padding avoids bank conflicts
    static constexpr int kSumBytes = kRingBytes / kHalves;  // the sums of all rows take the ring's place
    static_assert(sizeof(Input) == 2);
    static_assert(kTokens * kSumLine * static_cast<int>(sizeof(float)) <= kSumBytes);
};

template <class Traits>
using DecodeSums = typename Traits::Accumulator[Traits::kWarpRowTiles][Traits::kWarpTokenTiles][4];

}  // namespace ts::sm80
