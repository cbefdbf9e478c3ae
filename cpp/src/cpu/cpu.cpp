#include "cpu/cpu.h"

#include <cstdint>

#include "cpu/memory.h"
#include "cpu/products.h"
#include "cpu/steps.h"

namespace ts::cpu {
namespace {

template <const InstructionSet& set>
const char* refuses(const Problem& problem, const Device&) {
    const bool is_wide = problem.op == Op::sdd_tn && problem.result_dtype == DType::float32 &&
                         element_size(problem.input_dtype) == 2;
    if (problem.result_dtype != problem.input_dtype && !is_wide)
        return "it writes float32 instead of the dtype of x and y only for sdd_tn of 16 bits";
    return set.available() ? nullptr : set.missing;
}

// True if the product writes nothing.
bool is_empty(const Problem& problem) {
    if (problem.op == Op::sdd_tn) return problem.pattern.nnz == 0;
    return problem.tokens == 0 || problem.features() == 0;
}

template <const InstructionSet& set>
const Steps& steps_of(const Problem& problem) {
    return set.steps[static_cast<int>(problem.input_dtype)];
}

template <const InstructionSet& set>
size_t workspace_size(const Problem& problem, const Device& device, const Decision&) {
    const Steps& steps = steps_of<set>(problem);
    if (is_empty(problem)) return 0;
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
    if (problem.op == Op::sdd_tn)
        sdd(steps, set.steps[static_cast<int>(problem.result_dtype)].finish, problem, device, workspace);
    else if (suits_decode(steps, problem))
        decode(steps, problem, device, workspace);
    else
        dds(steps, problem, device, workspace);
    return 0;
}

template <const InstructionSet& set>
constexpr Kernel row(const char* name, uint32_t dtypes) {
    Kernel row{
        name,         DeviceType::cpu,     0,          0b111, dtypes, Precision::highest, {0, 0}, 0, 0, 0,
        refuses<set>, workspace_size<set>, launch<set>};
    row.result_dtypes = dtypes | 1u << static_cast<int>(DType::float32);  // see refuses
    return row;
}

constexpr uint32_t kEveryDType = 0b1111;
[[maybe_unused]] constexpr uint32_t kBFloat16 = 1u << static_cast<int>(DType::bfloat16);

constexpr Kernel kKernels[] = {
#ifdef __x86_64__
    row<amx_bf16>("cpu_amx_bf16", kBFloat16),   row<avx512_bf16>("cpu_avx512_bf16", kBFloat16),
    row<avx512>("cpu_avx512", kEveryDType),     row<avx2>("cpu_avx2", kEveryDType),
#endif
    row<portable>("cpu_portable", kEveryDType),
};

}  // namespace

std::span<const Kernel> kernels() { return kKernels; }

}  // namespace ts::cpu
