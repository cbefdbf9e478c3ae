// Hostile calls of the C interface: fuzz_abi [calls [seed]]. Every call begins with valid arguments, of which
// some are then replaced: wild numbers, missing and misaligned memory, structures too short and too long,
// broken patterns. Memory has exactly the size that the arguments claim, so that a sanitizer sees every
// access beyond it; where they claim too much it is null. What must hold: the status is one that fits, with a
// sentence if it is an error, and then no result was written. All memory is that of the host. So calls for a
// CUDA device must end in an error where there is none; where there is one, what they would write lies at odd
// addresses, which have to be refused before anything is launched.
#include <stdlib.h>
#include <tilesparse/tilesparse.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>

#include "fuzz_arguments.h"
#include "fuzz_encoder.h"
#include "fuzz_memory.h"
#include "fuzz_rules.h"
#include "fuzz_values.h"

using namespace fuzz;

namespace {

void call_constants() {
    check("ts_abi_version", ts_abi_version() == TS_ABI_VERSION);
    check("ts_version", std::strcmp(ts_version(), TS_VERSION) == 0);
    check("ts_architectures", std::strncmp(ts_architectures(), "cpu", 3) == 0);
    check_status("ts_plan_check", ts_plan_check());
}

void call_get() {
    call_constants();
    // Longer ones are filled up with zeros, so that all of it must be there.
    ts_kernel_info* const kernel = as_caller_has_it(ts_kernel_info{});
    check_status("ts_kernel_get", ts_kernel_get(some_kernel(), kernel));
    ts_device_info* const device = as_caller_has_it(ts_device_info{});
    const auto ordinal = static_cast<int32_t>(chance(50) ? -1 : wild_number());
    check_status("ts_device_get", ts_device_get(static_cast<int32_t>(draw(-1, 2)), ordinal, device));
    check("ts_status_string", ts_status_string(static_cast<int32_t>(wild_number())) != nullptr);
}

void call_pattern() {
    const ts_pattern pattern = some_pattern();
    check_status("ts_pattern_validate", ts_pattern_validate(as_caller_has_it(pattern)));
    const wide nnz = pattern.nnz,
               cols = blocks_of(pattern.in_features, pattern.block_cols) * groups_of(pattern);
    auto* const col_ptr = reinterpret_cast<int32_t*>(take_some((cols + 1) * 4));
    auto* row_idx = reinterpret_cast<int32_t*>(take_some(nnz * 4));
    auto* const col_slot = reinterpret_cast<int32_t*>(take_some(nnz * 4));
    if (chance(5)) row_idx = const_cast<int32_t*>(pattern.col_idx);
    const bool done = check_status(
        "ts_pattern_transpose", ts_pattern_transpose(as_caller_has_it(pattern), col_ptr, row_idx, col_slot));
    check("ts_pattern_transpose", done || is_untouched(col_slot));
}

void call_select() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const Result kernel(4), reason(256);
    const size_t reason_bytes = chance(80) ? 256 : static_cast<size_t>(draw(0, 4));
    ts_device_info device = some_device();
    if (chance(80)) desc.device = device.device;
    const bool done = check_status("ts_matmul_select",
                                   ts_matmul_select(as_caller_has_it(desc), as_caller_has_it(device),
                                                    kernel.as<int32_t>(), reason.as<char>(), reason_bytes));
    kernel.check_untouched("ts_matmul_select", done);
    reason.check_untouched("ts_matmul_select", done);
}

// A measurement decides what later calls choose, and is forgotten before the next call, which may be repeated
// alone.
void call_estimate() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const ts_device_info device = some_device();
    if (chance(80)) desc.device = device.device;
    const int32_t kernel = some_kernel();
    const Result time(8);
    time.check_untouched("ts_matmul_estimate",
                         check_status("ts_matmul_estimate",
                                      ts_matmul_estimate(as_caller_has_it(desc), as_caller_has_it(device),
                                                         kernel, time.as<double>())));
    int32_t count = static_cast<int32_t>(chance(80) ? 64 : draw(-1, 63));
    const Result features(8 * static_cast<size_t>(std::max(count, 0))), family(16);
    features.check_untouched(
        "ts_matmul_features",
        check_status("ts_matmul_features",
                     ts_matmul_features(as_caller_has_it(desc), as_caller_has_it(device), kernel,
                                        features.as<double>(), chance(2) ? nullptr : &count,
                                        family.as<char>(), family.as<char>() == nullptr ? 0 : 16)));
    check_status("ts_measurement_add",
                 ts_measurement_add(as_caller_has_it(desc), as_caller_has_it(device), kernel,
                                    static_cast<double>(wild_number()), static_cast<double>(draw(-1, 9))));
    int32_t chosen = 0;
    check_status("ts_matmul_select",
                 ts_matmul_select(as_caller_has_it(desc), as_caller_has_it(device), &chosen, nullptr, 0));
    check_status("ts_measurements_clear", ts_measurements_clear());
}

void call_sizes() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, false);
    desc.pattern = as_caller_has_it(pattern);
    const Result workspace(8), prepacked(8);
    workspace.check_untouched(
        "ts_matmul_workspace_size",
        check_status("ts_matmul_workspace_size",
                     ts_matmul_workspace_size(as_caller_has_it(desc), workspace.as<size_t>())));
    prepacked.check_untouched(
        "ts_values_prepacked_size",
        check_status("ts_values_prepacked_size",
                     ts_values_prepacked_size(as_caller_has_it(desc), prepacked.as<size_t>())));
}

void call_plan() {
    const ts_pattern pattern = some_pattern();
    const int32_t kernel = some_kernel(), op = some_op();
    const Result key(8), needed(8);
    key.check_untouched(
        "ts_plan_key",
        check_status("ts_plan_key", ts_plan_key(as_caller_has_it(pattern), kernel, op, key.as<int64_t>())));
    size_t bytes = 0;
    check_status("ts_plan_size", ts_plan_size(as_caller_has_it(pattern), kernel, op, &bytes));
    needed.check_untouched("ts_plan_size",
                           check_status("ts_plan_size", ts_plan_size(as_caller_has_it(pattern), kernel, op,
                                                                     needed.as<size_t>())));
    if (chance(10)) bytes = static_cast<size_t>(draw(0, 256));
    const Result plan(bytes);
    plan.check_untouched("ts_plan_build",
                         check_status("ts_plan_build", ts_plan_build(as_caller_has_it(pattern), kernel, op,
                                                                     plan.data, bytes)));
}

// Host memory, which the functions that work on the GPU refuse.
void call_device_plan() {
    const ts_pattern pattern = some_pattern();
    const int32_t kernel = some_kernel(), op = some_op();
    const Result plan_bytes(8), workspace_bytes(8);
    const bool sized = check_status(
        "ts_plan_device_size", ts_plan_device_size(as_caller_has_it(pattern), kernel, op,
                                                   plan_bytes.as<size_t>(), workspace_bytes.as<size_t>()));
    plan_bytes.check_untouched("ts_plan_device_size", sized);
    const Result memory(4096);
    const auto claimed = static_cast<size_t>(wild_number());
    check_status("ts_plan_device_build",
                 ts_plan_device_build(as_caller_has_it(pattern), kernel, op, memory.data, claimed,
                                      memory.data, claimed, nullptr));
    check_status("ts_pattern_device_transpose_size",
                 ts_pattern_device_transpose_size(as_caller_has_it(pattern), workspace_bytes.as<size_t>()));
    auto* const array = memory.as<int32_t>();
    const bool transposed = check_status("ts_pattern_device_transpose",
                                         ts_pattern_device_transpose(as_caller_has_it(pattern), array, array,
                                                                     array, memory.data, claimed, nullptr));
    memory.check_untouched("functions of the device", false);
    check("ts_pattern_device_transpose", !transposed);
    ts_array_pair pair{array, array, wild_number(), 0};
    const auto count = static_cast<int32_t>(wild_number());
    const bool compared = check_status(
        "ts_arrays_compare", ts_arrays_compare(chance(10) ? nullptr : &pair, count, wild_number(), nullptr));
    check("ts_arrays_compare", !compared || count == 0);
}

void call_matmul() {
    const ts_pattern pattern = some_pattern();
    ts_matmul_desc desc = some_product(pattern, true);
    const ts_matmul_desc operands = desc;
    if (desc.device == TS_CUDA) {
        desc.x.data = for_device(desc.x.data);
        desc.y.data = for_device(desc.y.data);
        desc.values.data = for_device(desc.values.data);
        desc.bias.data = for_device(desc.bias.data);
    }
    const ts_matmul_desc* const given = followed_product(desc, pattern);
    size_t bytes = 0;
    check_status("ts_matmul_workspace_size", ts_matmul_workspace_size(given, &bytes));
    if (chance(5)) bytes = static_cast<size_t>(draw(0, 4096));
    const Result workspace(bytes);
    unsigned char* scratch = workspace.data;
    if (const size_t held = held_at(operands.values.data); chance(5) && held >= bytes)
        scratch = static_cast<unsigned char*>(operands.values.data);
    const bool done = check_status("ts_matmul", ts_matmul(given, scratch, bytes, nullptr));
    workspace.check_untouched("ts_matmul", done);
    for (const void* operand : {operands.x.data, operands.y.data, operands.values.data, operands.bias.data})
        check("ts_matmul", done || is_untouched(operand));
    const bool prepacked =
        check_status("ts_values_prepack", ts_values_prepack(given, workspace.data, bytes, nullptr));
    check_without_gpu("ts_matmul", given, done);
    check_without_gpu("ts_values_prepack", given, prepacked);
}

void call_any() {
    switch (draw(0, 18)) {
        case 0:
            return call_get();
        case 1:
            return call_pattern();
        case 2:
            return call_select();
        case 3:
            return call_sizes();
        case 4:
        case 5:
            return call_plan();
        case 6:
            return call_device_plan();
        case 7:
            return call_dequantize();
        case 8:
            return call_compress();
        case 9:
            return call_estimate();
        case 10:
            return call_activation_gradient();
        case 11:
            return call_gate();
        case 12:
            return call_quantize();
        case 13:
            return call_group_sums();
        case 14:
            return call_combine();
        case 15:
            return call_encoder();
        default:
            return call_matmul();
    }
}

}  // namespace

int main(int argc, char** argv) {
    const long calls = argc > 1 ? strtol(argv[1], nullptr, 10) : 10000;
    const unsigned long long seed = argc > 2 ? strtoull(argv[2], nullptr, 10) : 1;
    for (long i = 0; i < calls && broken == nullptr; ++i) {
        // A seed of the call's own, so that `fuzz_abi 1 seed` repeats a call by the number that is printed.
        state = (seed + static_cast<uint64_t>(i)) * 0x2545f4914f6cdd1du;
        call_any();
        if (broken != nullptr)
            std::printf("%s, seed %llu: %s\n", broken, seed + static_cast<uint64_t>(i), ts_last_error());
        for (const Block& block : blocks) free(block.memory);
        blocks.clear();
    }
    return broken == nullptr ? 0 : 1;
}
