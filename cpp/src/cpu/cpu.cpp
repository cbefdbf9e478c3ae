#include "cpu/cpu.h"

#include <cstdint>

#include "cpu/memory.h"
#include "cpu/packed_values.h"
#include "cpu/products.h"
#include "cpu/steps.h"

namespace ts::cpu {
namespace {

template <const InstructionSet& set>
const char* refuses(const Problem& problem, const Device&) {
    const bool is_wide = problem.op == Op::sdd_tn && problem.result_dtype == DType::float32 &&
                         element_size(problem.input_dtype) == 2;
    if (problem.result_dtype != problem.input_dtype && !is_wide && !is_quantized(problem.input_dtype))
        return "it writes float32 instead of the dtype of x and y only for sdd_tn of 16 bits";
    return set.available() ? nullptr : set.missing;
}

template <const InstructionSet& set>
const char* refuses_int4(const Problem& problem, const Device&) {
    if (!suits_decode(set.steps[static_cast<int>(problem.input_dtype)], problem))
        return "it is for fewer tokens, and row-major results";
    return set.available() ? nullptr : set.missing;
}

// True if the product writes nothing.
bool is_empty(const Problem& problem) {
    if (problem.op == Op::sdd_tn) return problem.pattern.nnz == 0;
    return problem.tokens == 0 || problem.features() == 0;
}

template <const InstructionSet& set>
const Steps& steps_of(const Problem& problem) {
    return set.steps[static_cast<int>(problem.scales_inside() ? DType::float32 : problem.input_dtype)];
}

template <const InstructionSet& set>
size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
    const Steps& steps = steps_of<set>(problem);
    if (is_empty(problem)) return 0;
    if (problem.grouped()) return groups_workspace_size(steps, problem, device);
    if (problem.scales_inside()) return scaled_workspace_size(steps, problem, device);
    if (problem.op == Op::sdd_tn) return sdd_workspace_size(steps, problem, device);
    if (suits_decode(steps, problem)) return decode_workspace_size(steps, problem, device);
    return dds_workspace_size(steps, problem, device);
}

template <const InstructionSet& set>
int32_t launch(const Problem& problem, const Device& device, const Decision& decision, void* workspace,
               void*) {
    const Steps& steps = steps_of<set>(problem);
    if (is_empty(problem)) return 0;
    advise_huge_pages(workspace, workspace_size<set>(problem, device, decision));
    const Finish finish = set.steps[static_cast<int>(problem.result_dtype)].finish;
    if (problem.grouped())
        groups(steps, finish, problem, device, workspace);
    else if (problem.scales_inside())
        scaled(steps, finish, problem, device, workspace);
    else if (problem.op == Op::sdd_tn)
        sdd(steps, finish, problem, device, workspace);
    else if (suits_decode(steps, problem))
        decode(steps, finish, problem, device, workspace);
    else
        dds(steps, finish, problem, device, workspace);
    return 0;
}

// Steps that blocks of any size need: those of the dtype, and those of its sums.
template <const InstructionSet& set>
const Steps& steps_of_sums(const Problem& problem) {
    return set.steps[static_cast<int>(problem.accumulator_dtype())];
}

template <const InstructionSet& set>
size_t blocks_workspace(const Problem& problem, const Device& device, const Decision&) {
    if (is_empty(problem)) return 0;
    return blocks_workspace_size(steps_of<set>(problem), steps_of_sums<set>(problem), problem, device);
}

template <const InstructionSet& set>
int32_t launch_blocks(const Problem& problem, const Device& device, const Decision& decision, void* workspace,
                      void*) {
    if (is_empty(problem)) return 0;
    advise_huge_pages(workspace, blocks_workspace<set>(problem, device, decision));
    const Finish finish = set.steps[static_cast<int>(problem.result_dtype)].finish;
    blocks(steps_of<set>(problem), steps_of_sums<set>(problem), finish, problem, device, workspace);
    return 0;
}

// Input dtypes in any combination; refuses() says which results go with which.
template <const InstructionSet& set>
constexpr Kernel row(const char* name, uint32_t ops, uint32_t inputs, uint32_t results) {
    Kernel row{
        name,         DeviceType::cpu,     0,          ops, inputs, Precision::highest, {0, 0}, 0, 0, 0,
        refuses<set>, workspace_size<set>, launch<set>};
    row.result_dtypes = results;
    row.grouped = 0b11;
    return row;
}

constexpr uint32_t kEveryOp = bits_of(Op::dds_nt, Op::dds_nn, Op::sdd_tn);
constexpr uint32_t kEightBits = bits_of(DType::int8, DType::float8_e4m3fn);
constexpr uint32_t kEightBitResults = bits_of(DType::float32, DType::float16, DType::bfloat16);
constexpr uint32_t kEveryResult = kEightBitResults | bits_of(DType::float64);

// Inputs of 8 bits with dds_nt only.
template <const InstructionSet& set>
constexpr Kernel every_dtype(const char* name) {
    Kernel row = ts::cpu::row<set>(name, kEveryOp, kEveryResult | kEightBits, kEveryResult);
    row.scales_inside = 0b11;
    return row;
}

// Few tokens by values of int4.
template <const InstructionSet& set>
constexpr Kernel values_of_int4(const char* name) {
    Kernel row = ts::cpu::row<set>(name, bits_of(Op::dds_nt), kEightBitResults, 0);
    row.refuses = refuses_int4<set>;
    row.max_tokens = 8;  // with the widest vectors, half as many as their lanes
    row.values_dtypes = bits_of(DType::int4);
    return row;
}

// Blocks with sides of any length.
template <const InstructionSet& set>
constexpr Kernel any_block(const char* name) {
    Kernel row = ts::cpu::row<set>(name, kEveryOp, kEveryResult, kEveryResult);
    row.workspace_size = blocks_workspace<set>;
    row.launch = launch_blocks<set>;
    row.grouped = bits_of(0);
    row.any_block = true;
    return row;
}

#ifdef __x86_64__
template <const InstructionSet& set>
constexpr Kernel only_bfloat16(const char* name) {
    return row<set>(name, kEveryOp, bits_of(DType::bfloat16), bits_of(DType::bfloat16, DType::float32));
}

template <const InstructionSet& set>
constexpr Kernel only_int8(const char* name) {
    return row<set>(name, bits_of(Op::dds_nt), bits_of(DType::int8), kEightBitResults);
}

// Encoders read packed values.
constexpr Kernel amx_int8_kernel() {
    Kernel row = only_int8<amx_int8>("cpu_amx_int8");
    row.prepacked_size = packed_values_size;
    row.prepack = pack_values;
    return row;
}
#endif

constexpr Kernel kKernels[] = {
#ifdef __x86_64__
    only_bfloat16<amx_bf16>("cpu_amx_bf16"),
    only_bfloat16<avx512_bf16>("cpu_avx512_bf16"),
    amx_int8_kernel(),
    only_int8<avx512_vnni>("cpu_avx512_vnni"),
    only_int8<avx_vnni>("cpu_avx_vnni"),
    every_dtype<avx512>("cpu_avx512"),
    every_dtype<avx2>("cpu_avx2"),
#endif
    every_dtype<portable>("cpu_portable"),
#ifdef __x86_64__
    values_of_int4<avx512>("cpu_avx512_4_bits"),
    values_of_int4<avx2>("cpu_avx2_4_bits"),
#endif
    values_of_int4<portable>("cpu_portable_4_bits"),
#ifdef __x86_64__
    any_block<avx512>("cpu_avx512_blocks"),
    any_block<avx2>("cpu_avx2_blocks"),
#endif
    any_block<portable>("cpu_portable_blocks"),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

const InstructionSet* instruction_set_of(const Kernel& kernel) {
#ifdef __x86_64__
    if (kernel.launch == launch<amx_int8>) return &amx_int8;
    if (kernel.launch == launch<avx512_vnni>) return &avx512_vnni;
    if (kernel.launch == launch<avx_vnni>) return &avx_vnni;
    if (kernel.launch == launch<avx512>) return &avx512;
    if (kernel.launch == launch<avx2>) return &avx2;
#endif
    return kernel.launch == launch<portable> ? &portable : nullptr;
}

}  // namespace ts::cpu
