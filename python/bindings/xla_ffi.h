// The part of XLA's foreign function interface (https://openxla.org/xla/custom_call, xla/ffi/api/c_api.h,
// Apache-2.0) that tilesparse._C uses: how XLA calls a handler, and the functions that it offers. Only facts
// of that binary interface are stated here, with names of our own; fields and functions behind those that are
// named are not touched, so that the releases of JAX which append some are served, too.

#pragma once

#include <cstddef>
#include <cstdint>

namespace xla_ffi {

constexpr int32_t major_version = 0;

enum ExtensionType : int32_t { metadata_extension = 1 };
enum Stage : int32_t { execute = 3 };
enum AttributeType : int32_t { scalar_attribute = 3 };
enum DataType : int32_t { s8 = 2, s32 = 4, u8 = 6, f16 = 10, f32 = 11, f64 = 12, bf16 = 16 };
enum ErrorCode : int32_t { invalid_argument = 3, exhausted = 8, unimplemented = 12, internal = 13 };

struct Error;  // belong to XLA
struct Context;

struct Extension {
    size_t struct_size;
    ExtensionType type;
    Extension* next;
};

struct Version {
    size_t struct_size;
    Extension* extensions;
    int32_t major;
    int32_t minor;
};

// XLA asks for this before the first call.
struct Metadata {
    size_t struct_size;
    Version version;
    uint32_t traits;
};

struct MetadataExtension {
    Extension base;
    Metadata* metadata;
};

struct CreateError {
    size_t struct_size;
    Extension* extensions;
    const char* message;
    ErrorCode code;
};

struct DestroyError {
    size_t struct_size;
    Extension* extensions;
    Error* error;
};

struct GetStream {
    size_t struct_size;
    Extension* extensions;
    Context* context;
    void* stream;
};

struct Allocate {
    size_t struct_size;
    Extension* extensions;
    Context* context;
    size_t bytes;
    size_t alignment;
    void* data;
};

struct Free {
    size_t struct_size;
    Extension* extensions;
    Context* context;
    size_t bytes;
    void* data;
};

struct Api {
    size_t struct_size;
    Extension* extensions;
    Version version;
    const void* internal;
    Error* (*create_error)(CreateError*);
    void* of_errors;
    void (*destroy_error)(DestroyError*);
    void* register_handler;
    Error* (*get_stream)(GetStream*);
    void* of_types_and_states[4];
    Error* (*allocate)(Allocate*);  // memory of the device, to be freed within the call
    Error* (*free)(Free*);
};

struct Buffer {
    size_t struct_size;
    Extension* extensions;
    DataType dtype;
    void* data;
    int64_t rank;
    const int64_t* dims;
};

// Arguments and results of a call, all of which are buffers.
struct Buffers {
    size_t struct_size;
    Extension* extensions;
    int64_t count;
    const int32_t* types;
    Buffer* const* buffers;
};

struct Text {
    const char* data;
    size_t size;
};

struct Scalar {
    DataType dtype;
    const void* value;
};

struct Attributes {
    size_t struct_size;
    Extension* extensions;
    int64_t count;
    const AttributeType* types;
    const Text* const* names;
    const void* const* values;
};

struct Call {
    size_t struct_size;
    Extension* extensions;
    const Api* api;
    Context* context;
    Stage stage;
    Buffers arguments;
    Buffers results;
    Attributes attributes;
};

using Handler = Error*(Call*);

}  // namespace xla_ffi
