// Where operands lie in memory: that it can hold them, and that nothing that is read is written.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "common/problem.h"
#include "gate.h"
#include "sums.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Memory from `begin` to `end` in which lines of `length` bytes begin every `pitch` bytes.
struct Span {
    uintptr_t begin;
    uintptr_t end;
    uint64_t pitch;
    uint64_t length;
};

struct Operand {
    const char* name;
    Span span;
};

// So many bytes on end; none where there is no address.
Operand area(const char* name, const void* data, uint64_t bytes);

// Throws if the two share a byte, of which one is written.
void check_apart(const Operand& one, const Operand& other);

// A pattern's arrays that a product, or its plan, reads: by column for dds_nn, otherwise by row.
std::array<Operand, 3> arrays_of(const Pattern& pattern, Op op);

// The operands of a product, which are checked: pointers, leading dimensions, alignment and overlap.
class Operands {
  public:
    Operands(const Problem& problem, const ts_matmul_desc& desc);

    // Scratch memory, which lies apart from all of them.
    void add_workspace(const void* data, size_t bytes);

    // More that is read, which lies apart from all that is written.
    void check_read(const Operand& read) const;

  private:
    static constexpr size_t kOperands = 10;
    std::array<Operand, kOperands> operands_;
    std::array<Operand, 3> written_{};  // the result, the gradient of the bias and the workspace
};

// Checks where values and plan of a problem lie, for packing the values into other memory than theirs.
void check_packing(const Problem& problem, size_t plan_bytes, const void* packed, size_t bytes);

// Checks memory for the expansion of the values, and where these lie.
void check_expansion(const Problem& problem, const void* plain, size_t bytes);

// Plain values that are to be compressed, see ts_values_compress.
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

}  // namespace ts
