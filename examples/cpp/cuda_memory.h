// Memory of the current CUDA device for tilesparse::Buffer, from the CUDA runtime.

#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>
#include <string>

inline void check_cuda(cudaError_t status) {
    if (status != cudaSuccess) throw std::runtime_error(std::string("CUDA: ") + cudaGetErrorString(status));
}

struct CudaMemory {
    static void* allocate(std::size_t bytes) {
        void* memory = nullptr;
        check_cuda(cudaMalloc(&memory, bytes));
        return memory;
    }
    static void deallocate(void* memory) noexcept { cudaFree(memory); }
    static void copy(void* to, const void* from, std::size_t bytes) {
        check_cuda(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
        check_cuda(cudaStreamSynchronize(nullptr));  // a copy from pageable memory may return early
    }
};
