// Values from one storage to another, see tilesparse.h, in device memory. Everything is enqueued on a stream;
// both return 0 or the CUDA error of the launch.
#pragma once

#include "common/problem.h"

namespace ts::values {

// Writes dense blocks in the dtype of the input.
int32_t dequantize(const Problem& problem, void* dense, void* stream);

struct Compression {
    int32_t block_rows, block_cols;
    int64_t nnz;
    int element_size;
    bool transposed;
    const void* values;   // dense blocks
    const uint8_t* mask;  // of the same shape
    void* compressed;
    uint32_t* metadata;
};

int32_t compress(const Compression& compression, void* stream);

}  // namespace ts::values
