// Reading and writing across the C interface: pointers, and structures of any version of the header.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "error.h"
#include "tilesparse/tilesparse.h"

namespace ts {

// Bytes of each structure in the first version of the public header. No caller has a shorter one.
template <class T>
inline constexpr uint32_t kFirstSize = 0;
template <>
inline constexpr uint32_t kFirstSize<ts_pattern> = 88;
template <>
inline constexpr uint32_t kFirstSize<ts_matmul_desc> = 504;
template <>
inline constexpr uint32_t kFirstSize<ts_device_info> = 88;
template <>
inline constexpr uint32_t kFirstSize<ts_kernel_info> = 116;
template <>
inline constexpr uint32_t kFirstSize<ts_encoder_layer> = 488;
template <>
inline constexpr uint32_t kFirstSize<ts_encoder_desc> = 168;

// More than any version will have. A larger size is a mistake, and memory is not read that far.
constexpr uint32_t kMostSize = 4096;

// Alignment in bytes on a CUDA device: of operands and plans, and of workspaces and prepacked values.
constexpr size_t kDeviceAlignment = 16;
constexpr size_t kDeviceAreaAlignment = 256;

inline bool is_aligned(const void* address, size_t alignment) {
    return reinterpret_cast<uintptr_t>(address) % alignment == 0;
}

inline void check_aligned(const void* address, size_t alignment, const char* name) {
    require(is_aligned(address, alignment), name, " must be aligned to ", alignment, " bytes, got address ",
            address);
}

// A pointer through which a T, or an array of them, is read or written.
template <class T>
void check_pointer(const T* pointer, const char* name) {
    require(pointer != nullptr, name, " must not be null");
    check_aligned(pointer, alignof(T), name);
}

// The struct_size of a structure that the caller gives or wants filled in.
template <class T>
uint32_t checked_size(const T* structure, const char* name) {
    static_assert(kFirstSize<T> > 0 && kFirstSize<T> <= sizeof(T) && offsetof(T, struct_size) == 0);
    check_pointer(structure, name);
    const uint32_t size = structure->struct_size;
    require(size >= kFirstSize<T> && size <= kMostSize, name, ".struct_size must be ", kFirstSize<T>,
            " (the first version) to ", kMostSize, ", got ", size);
    return size;
}

// A copy of a structure of any version: fields that the caller does not know are zero, and those that this
// library does not know must be.
template <class T>
T read_struct(const T* source, const char* name) {
    const uint32_t size = checked_size(source, name);
    const auto* const bytes = reinterpret_cast<const unsigned char*>(source);
    for (uint32_t i = sizeof(T); i < size; ++i)
        require(bytes[i] == 0, name, " must be 0 beyond the ", sizeof(T), " bytes that this library (ABI ",
                TS_ABI_VERSION, ") knows, got a nonzero byte ", i);
    T copy{};
    std::memcpy(&copy, source, std::min<size_t>(size, sizeof(T)));
    return copy;
}

// Fills in a result that checked_size() has seen: its struct_size stays, fields that this library does not
// know become zero.
template <class T>
void write_struct(T value, T* target) {
    const uint32_t size = value.struct_size = target->struct_size;
    auto* const bytes = reinterpret_cast<unsigned char*>(target);
    std::memcpy(bytes, &value, std::min<size_t>(size, sizeof(T)));
    if (size > sizeof(T)) std::memset(bytes + sizeof(T), 0, size - sizeof(T));
}

}  // namespace ts
