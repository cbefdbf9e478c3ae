// Checks of operands in memory: they fit, and nothing that is read is written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "activations.h"
#include "bias_gradient.h"
#include "common/problem.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Memory from `begin` to `end`: rows (or columns) of `length` bytes, `stride` bytes apart.
struct Span {
    uintptr_t begin;
    uintptr_t end;
    uint64_t stride;
    uint64_t length;
};

struct Operand {
    const char* name;
    Span span;
};

// The memory of a matrix, whose address, leading dimension and size are checked; `in_lines`: both are
// multiples of 16 bytes.
Span check_operand(const Matrix& matrix, int64_t tokens, int64_t features, DType dtype, const char* name,
                   DeviceType device, bool in_lines);
inline Span check_operand(const Matrix& matrix, int64_t tokens, int64_t features, DType dtype,
                          const char* name, DeviceType device) {
    return check_operand(matrix, tokens, features, dtype, name, device, device == DeviceType::cuda);
}

// Contiguous memory, empty where `data` is null.
Operand area(const char* name, const void* data, uint64_t bytes);

// Throws if the two share a byte.
void check_apart(const Operand& one, const Operand& other);

// Throws unless offsets in host memory ascend from 0 to the number of tokens.
void check_offsets(const int32_t* offsets, int64_t groups, int64_t tokens,
                   const char* name = "group_offsets");

// A pattern's arrays that a product, or its plan, reads: by column for dds_nn, otherwise by row.
std::array<Operand, 3> arrays_of(const Pattern& pattern, Op op);

// The operands of a product. The constructor checks pointers, leading dimensions, alignment and overlap.
class Operands {
  public:
    Operands(const Problem& problem, const ts_matmul_desc& desc);

    // Checks that scratch memory overlaps none of them.
    void add_workspace(const void* data, size_t bytes);

    // Checks that more output overlaps none of them.
    void check_written(const Operand& written) const;

    // Checks that more input overlaps no output.
    void check_read(const Operand& read) const;

  private:
    static constexpr size_t kOperands = 12;
    std::array<Operand, kOperands> operands_;
    std::array<Operand, 3> written_{};  // the result, the gradient of the bias and the workspace
};

// Checks values, plan and target of ts_values_prepack.
void check_prepacking(const Problem& problem, size_t plan_bytes, const void* prepacked, size_t bytes);

// Checks the values of ts_values_dequantize and the memory for its dense blocks.
void check_dequantization(const Problem& problem, const void* dense, size_t bytes);

// The arguments of ts_values_compress.
struct Compression {
    Pattern pattern;
    DeviceType device;
    DType dtype;
    bool transposed;
    const void* values;
    const uint8_t* mask;
    void* compressed;
    uint32_t* metadata;
};
void check_compression(const Compression& compression);

// The operands of ts_activation_gradient, and its workspace; those of ts_gate and ts_gate_gradient.
void check_operands(const ActivationGradient& gradient);
void check_workspace(const ActivationGradient& gradient, const void* workspace, size_t bytes);
void check_operands(const Gate& gate, bool gradients);

// The operands of ts_group_sums.
void check_operands(const GroupSums& sums);

// The operands of ts_quantize.
void check_operands(const Quantization& quantization);

}  // namespace ts
