// The library when host memory runs out: whichever allocation fails, the caller gets a status and a sentence.
#include <tilesparse/tilesparse.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <vector>

namespace {

int64_t allocations_left = INT64_MAX;

void* allocate(std::size_t size) {
    if (allocations_left-- <= 0) throw std::bad_alloc();
    if (void* memory = std::malloc(size)) return memory;
    throw std::bad_alloc();
}

constexpr int kRows = 8;
int32_t ptr[kRows + 1], idx[kRows], slot[kRows];

ts_pattern diagonal() {
    for (int i = 0; i < kRows; ++i) ptr[i + 1] = i + 1, idx[i] = slot[i] = i;
    ts_pattern pattern{};
    pattern.struct_size = sizeof pattern;
    pattern.block_rows = pattern.block_cols = 16;
    pattern.out_features = pattern.in_features = 16 * kRows;
    pattern.nnz = kRows;
    pattern.row_ptr = pattern.col_ptr = ptr;
    pattern.col_idx = pattern.row_idx = idx;
    pattern.row_slot = pattern.col_slot = slot;
    return pattern;
}

// Lets the first, second, ... allocation of a call fail until none does: the call then returns `expected`.
template <class Call>
bool survives(const char* name, ts_status_t expected, Call call) {
    for (int64_t allowed = 0; allowed < 10000; ++allowed) {
        allocations_left = allowed;
        const ts_status_t status = call();
        const bool failed = allocations_left < 0;
        allocations_left = INT64_MAX;
        if (!failed && status == expected) return true;
        // A sentence that could not be kept is replaced by a shorter one; the status may be the call's own.
        if (failed && (status == TS_OUT_OF_MEMORY || status == expected) && ts_last_error()[0] != '\0')
            continue;
        std::printf("%s with %d allocations: %s, \"%s\"\n", name, static_cast<int>(allowed),
                    ts_status_string(status), ts_last_error());
        return false;
    }
    std::printf("%s never ends\n", name);
    return false;
}

}  // namespace

void* operator new(std::size_t size) { return allocate(size); }
void* operator new[](std::size_t size) { return allocate(size); }
void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    return allocations_left-- <= 0 ? nullptr : std::malloc(size);
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
    ts_pattern pattern = diagonal();
    ts_kernel_info info{};
    info.struct_size = sizeof info;
    bool ok = survives("ts_kernel_get", TS_SUCCESS, [&] { return ts_kernel_get(1, &info); });
    ok &= survives("ts_pattern_validate", TS_SUCCESS, [&] { return ts_pattern_validate(&pattern); });
    for (int32_t kernel = 1; kernel <= ts_kernel_count(); ++kernel) {
        size_t bytes = 0;
        ts_kernel_get(kernel, &info);
        int32_t op = TS_DDS_NT;
        while (!(info.ops >> op & 1)) ++op;
        ok &= survives(info.name, TS_SUCCESS, [&] { return ts_plan_size(&pattern, kernel, op, &bytes); });
    }
    ok &= survives("a bad kernel", TS_INVALID_ARGUMENT, [&] { return ts_kernel_get(-1, &info); });
    pattern.block_rows = 1;
    ok &= survives("a bad pattern", TS_INVALID_ARGUMENT, [&] { return ts_pattern_validate(&pattern); });
    return ok ? 0 : 1;
}
