// The part of DLPack's exchange of tensors between Python packages that tilesparse._C uses: the layout of
// structures of version 1, and the functions that a package offers (https://github.com/dmlc/dlpack,
// include/dlpack/dlpack.h, Apache-2.0). Only facts of that binary interface are stated here, with names of
// our own.

#pragma once

#include <cstdint>

namespace dlpack {

constexpr uint32_t major_version = 1;

enum DeviceType : int32_t { cpu = 1, cuda = 2 };
enum TypeCode : uint8_t { floating = 2, bfloat = 4 };

struct DType {
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
};

struct Tensor {
    void* data;
    int32_t device_type;
    int32_t device;
    int32_t dims;
    DType dtype;
    const int64_t* sizes;  // these two belong to the tensor
    const int64_t* strides;
    uint64_t byte_offset;
};

// The table that the attribute __dlpack_c_exchange_api__ of a tensor type points to. Functions return 0, or
// -1 with a Python exception set.
struct Exchange {
    uint32_t major;
    uint32_t minor;
    const Exchange* older;                      // the same for an earlier version, or null
    void* owning[3];                            // functions for tensors that are handed over
    int (*read)(void* object, Tensor* tensor);  // the object is not checked; may be null
    int (*current_stream)(int32_t device_type, int32_t device, void** stream);
};

}  // namespace dlpack
