// Rules that every call must keep.
#ifndef TILESPARSE_TESTS_FUZZ_RULES_H_
#define TILESPARSE_TESTS_FUZZ_RULES_H_

#include <tilesparse/tilesparse.h>

#include <cstddef>
#include <cstdint>

#include "fuzz_memory.h"

namespace fuzz {

inline bool find_gpu() {
    ts_device_info info{};
    info.struct_size = sizeof info;
    return ts_device_get(TS_CUDA, -1, &info) == TS_SUCCESS;
}
const bool has_gpu = find_gpu();

// The same memory, or on a machine with a GPU an address at which nothing may be written there.
template <class T>
inline T* for_device(T* memory) {
    return has_gpu && memory != nullptr ? reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(memory) | 1)
                                        : memory;
}

// The name of the call that broke a rule, or null.
inline const char* broken = nullptr;

inline void check(const char* call, bool holds) {
    if (!holds) broken = call;
}

inline bool check_status(const char* call, ts_status_t status) {
    check(call, status >= TS_SUCCESS && status <= TS_OUT_OF_MEMORY && status != TS_CUDA_ERROR);
    check(call, status == TS_SUCCESS || ts_last_error()[0] != '\0');
    return status == TS_SUCCESS;
}

// A product on a CUDA device needs one.
inline void check_without_gpu(const char* call, const ts_matmul_desc* desc, bool succeeded) {
    if (desc == nullptr || has_gpu || !succeeded) return;
    check(call, desc->device != TS_CUDA);
}

// A result of that many bytes is written by a call that succeeds and by no other.
struct Result {
    explicit Result(size_t size) : data(take_some(size)) {}
    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data);
    }
    void check_untouched(const char* call, bool succeeded) const {
        check(call, succeeded || is_untouched(data));
    }
    unsigned char* data;
};

}  // namespace fuzz

#endif  // TILESPARSE_TESTS_FUZZ_RULES_H_
