#include "neurons.h"

#include <algorithm>

#include "cpu/skipping.h"
#include "descriptors.h"
#include "device.h"
#include "error.h"

#ifdef TILESPARSE_CUDA
#include "elementwise/skip.h"
#endif

namespace ts {
namespace {

constexpr int64_t kMostTokens = 8;
constexpr int64_t kMostRows = int64_t{1} << 31;  // of k in values

bool is_multiplied(DType dtype, DeviceType device) {
    return dtype == DType::float16 || dtype == DType::bfloat16 ||
           (dtype == DType::float32 && device == DeviceType::cpu);
}

}  // namespace

void check_skip(const ts_matmul_desc& desc, Problem& problem) {
    require(desc.skip >= TS_SKIP_NOTHING && desc.skip <= TS_SKIP_OUTPUTS, "skip must be 0 to 2, got ",
            desc.skip);
    problem.skip = static_cast<Skip>(desc.skip);
    if (problem.skip == Skip::nothing)
        return require(desc.threshold == 0, "threshold must be 0 where skip is 0, got ", desc.threshold);
    require(desc.threshold >= 0, "threshold must be a number from 0 on, got ", desc.threshold);
    problem.threshold = desc.threshold;
    const auto refuse = [](bool given, const auto&... words) { require(!given, words..., " with skip"); };
    refuse(!problem.forward(), "op must be dds_nt");
    refuse(problem.grouped() && problem.skip == Skip::outputs, "group_offsets must be null for outputs");
    refuse(problem.x.layout != Layout::row_major, "x.layout must be ", TS_ROW_MAJOR);
    refuse(problem.y.layout != Layout::row_major, "y.layout must be ", TS_ROW_MAJOR);
    refuse(problem.tokens > kMostTokens && !problem.grouped(), "tokens must be at most ", kMostTokens);
    refuse(desc.kernel != 0, "kernel must be 0");
    const bool is_cpu = problem.device == DeviceType::cpu;
    refuse(!is_multiplied(problem.input_dtype, problem.device), "x.dtype must be ",
           is_cpu ? "float32, float16 or bfloat16" : "float16 or bfloat16");
    refuse(problem.result_dtype != problem.input_dtype, "y.dtype must be that of x");
    const Values& values = problem.values;
    refuse(values.is_compressed(), "values.storage must be ", TS_STORAGE_DENSE);
    const bool is_int8 = values.dtype == DType::int8, inputs = problem.skip == Skip::inputs;
    const int32_t rows = problem.pattern.block_rows, columns = problem.pattern.block_cols;
    refuse(is_quantized(values.dtype) && !(is_int8 && (is_cpu || inputs)), "values.dtype must be that of x",
           is_cpu || inputs ? " or int8" : "");
    refuse(is_int8 && is_cpu && std::min(rows, columns) < 32,
           "blocks of int8 must have 32 rows and columns or more");
    refuse(is_int8 && !is_cpu && (rows != 128 || columns < 64),
           "blocks of int8 must have 128 rows and 64 columns or more");
    refuse(problem.pattern.nnz > kMostRows / problem.pattern.block_cols,
           "pattern.nnz must be less than 2^31 columns of blocks");
    if (problem.skip == Skip::inputs) return;
    refuse(!problem.gated, "gate.data must not be null for outputs");
    refuse(problem.gate_activation != Activation::none, "activation must be 0 for outputs");
}

bool reads_by_column(const Problem& problem) {
    return problem.device == DeviceType::cpu && problem.skip == Skip::inputs;
}

size_t skip_workspace_size(const Problem& problem, const Device& device) {
    if (problem.tokens == 0 || problem.features() == 0) return 0;
    if (device.type == DeviceType::cpu) return cpu::skip_workspace_size(problem);
#ifdef TILESPARSE_CUDA
    return skip::workspace_size(problem, device);
#else
    fail_without_cuda();
#endif
}

void multiply_skipping(const Problem& problem, const Device& device, void* workspace,
                       [[maybe_unused]] void* stream) {
    if (problem.tokens == 0 || problem.features() == 0) return;
    if (device.type == DeviceType::cpu) return cpu::skip(problem, device, workspace);
#ifdef TILESPARSE_CUDA
    launch_checked("skip", [&] { return skip::launch(problem, device, workspace, stream); });
#else
    fail_without_cuda();
#endif
}

}  // namespace ts
