// How the metadata of 2:4 lies in memory, see tilesparse.h, for host and device.
#pragma once

namespace ts::values {

constexpr int kHalf = 16;  // columns that half a word of metadata has

// Index of a half in the metadata of a block with that many rows, in 16 bits. `column`: its first.
constexpr int half_index(int rows, int row, int column) {
    const int unit = column / 32 * (rows / 16) + row / 16;
    return ((unit * 8 + row % 8) * 2 + column / kHalf % 2) * 2 + row % 16 / 8;
}

}  // namespace ts::values
