// The library under several threads of its caller: results stay right, and each thread has the text of its
// own last error. The header is included as C++17, twice.
#include <tilesparse/tilesparse.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

namespace {

constexpr int kBlock = 16, kTokens = 3;

int32_t portable_kernel() {
    ts_kernel_info info{};
    info.struct_size = sizeof info;
    int32_t kernel = 1;
    while (ts_kernel_get(kernel, &info) == TS_SUCCESS && std::strcmp(info.name, "cpu_portable") != 0)
        ++kernel;
    return kernel;
}

// Chooses a kernel while other threads measure and forget, and names it for the calls that belong together.
bool choose(ts_matmul_desc& desc, int round) {
    static const int32_t portable = portable_kernel();
    ts_device_info cpu{};
    cpu.struct_size = sizeof cpu;
    int32_t kernel = -1;
    if (ts_device_get(TS_CPU, -1, &cpu) != TS_SUCCESS) return false;
    if (round % 3 == 0 && ts_measurement_add(&desc, &cpu, portable, 1 + round, 0) != TS_SUCCESS) return false;
    if (ts_matmul_select(&desc, &cpu, &kernel, nullptr, 0) != TS_SUCCESS || kernel < 1) return false;
    if (round % 3 == 1 && ts_measurements_clear() != TS_SUCCESS) return false;
    desc.kernel = kernel;
    return true;
}

// One block with W[n, k] = n + seed: y[t, n] is 16 * (n + seed) for x = 1.
bool multiply(float seed, int round) {
    const int32_t ptr[2] = {0, 1}, idx[1] = {0}, slot[1] = {0};
    ts_pattern pattern{};
    pattern.struct_size = sizeof pattern;
    pattern.block_rows = pattern.block_cols = kBlock;
    pattern.out_features = pattern.in_features = kBlock;
    pattern.nnz = 1;
    pattern.row_ptr = pattern.col_ptr = ptr;
    pattern.col_idx = pattern.row_idx = idx;
    pattern.row_slot = pattern.col_slot = slot;

    std::vector<float> x(kTokens * kBlock, 1), y(kTokens * kBlock), values(kBlock * kBlock);
    for (int i = 0; i < kBlock * kBlock; ++i) values[i] = static_cast<float>(i / kBlock) + seed;
    ts_matmul_desc desc{};
    desc.struct_size = sizeof desc;
    desc.tokens = kTokens;
    desc.pattern = &pattern;
    desc.x.data = x.data();
    desc.x.dtype = TS_FLOAT32;
    desc.y.data = y.data();
    desc.x.ld = desc.y.ld = kBlock;
    desc.values.data = values.data();

    size_t bytes = 0;
    if (!choose(desc, round)) return false;
    if (ts_matmul_workspace_size(&desc, &bytes) != TS_SUCCESS) return false;
    void* workspace = std::aligned_alloc(256, (bytes / 256 + 1) * 256);
    const ts_status_t status = ts_matmul(&desc, workspace, bytes, nullptr);
    std::free(workspace);
    if (status != TS_SUCCESS) return false;
    for (int i = 0; i < kTokens * kBlock; ++i)
        if (y[i] != kBlock * (static_cast<float>(i % kBlock) + seed)) return false;
    return true;
}

// The text names the kernel this thread asked for, whatever others asked for meanwhile.
bool fail_alone(int number) {
    ts_kernel_info info{};
    info.struct_size = sizeof info;
    if (ts_kernel_get(100000 + number, &info) != TS_INVALID_ARGUMENT) return false;
    std::this_thread::yield();
    return std::strstr(ts_last_error(), std::to_string(100000 + number).c_str()) != nullptr;
}

}  // namespace

int main() {
    constexpr int kThreads = 8, kRounds = 200;
    std::vector<int> failures(kThreads);
    std::vector<std::thread> threads;
    for (int t = 0; t < kThreads; ++t)
        threads.emplace_back([t, &failures] {
            for (int round = 0; round < kRounds; ++round)
                failures[t] += !multiply(static_cast<float>(t), t + round) + !fail_alone(t * kRounds + round);
        });
    for (auto& thread : threads) thread.join();
    int total = 0;
    for (const int count : failures) total += count;
    std::printf("%d failures\n", total);
    return total > 0;
}
