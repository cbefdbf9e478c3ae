// y = relu(x W^T + bias) on the CPU, where W [64, 64] keeps three of its four 32 x 32 blocks.

#include <tilesparse/tilesparse.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

static void check(ts_status_t status) {
    if (status == TS_SUCCESS) return;
    std::fprintf(stderr, "%s: %s\n", ts_status_string(status), ts_last_error());
    std::exit(1);
}

int main() {
    // Block row 0 keeps columns 0 and 1, block row 1 column 1; values are stored in that order.
    const std::vector<int32_t> row_ptr{0, 2, 3}, col_idx{0, 1, 1}, row_slot{0, 1, 2};
    std::vector<int32_t> col_ptr(3), row_idx(3), col_slot(3);

    ts_pattern pattern{};
    pattern.struct_size = sizeof pattern;
    pattern.block_rows = pattern.block_cols = 32;
    pattern.out_features = pattern.in_features = 64;
    pattern.nnz = 3;
    pattern.row_ptr = row_ptr.data();
    pattern.col_idx = col_idx.data();
    pattern.row_slot = row_slot.data();
    check(ts_pattern_validate(&pattern));
    check(ts_pattern_transpose(&pattern, col_ptr.data(), row_idx.data(), col_slot.data()));
    pattern.col_ptr = col_ptr.data();
    pattern.row_idx = row_idx.data();
    pattern.col_slot = col_slot.data();

    const int64_t tokens = 5;
    std::vector<float> x(tokens * 64, 1.0f), values(3 * 32 * 32, 0.5f), bias(64, -20.0f), y(tokens * 64);
    ts_matmul_desc product{};
    product.struct_size = sizeof product;
    product.op = TS_DDS_NT;
    product.dtype = TS_FLOAT32;
    product.device = TS_CPU;
    product.activation = TS_RELU;
    product.tokens = tokens;
    product.pattern = &pattern;
    product.x = {x.data(), 64, TS_ROW_MAJOR, 0};
    product.y = {y.data(), 64, TS_ROW_MAJOR, 0};
    product.values = values.data();
    product.bias = bias.data();

    size_t bytes = 0;
    check(ts_matmul_workspace_size(&product, &bytes));
    std::vector<std::uint64_t> workspace(bytes / 8 + 32);
    auto address = (reinterpret_cast<std::uintptr_t>(workspace.data()) + 255) / 256 * 256;
    check(ts_matmul(&product, reinterpret_cast<void*>(address), bytes, nullptr));

    // 64 inputs of 0.5 less 20 in the first 32 outputs; 32 of them, cut off at 0, in the others.
    std::printf("tilesparse %s: %g and %g, expected 12 and 0\n", ts_version(), y.front(), y.back());
    return y.front() == 12.0f && y.back() == 0.0f ? 0 : 1;
}
