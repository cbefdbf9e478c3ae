// Products as XLA calls them, for tilesparse.jax: handlers of its foreign function interface.

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>

#include "support.h"
#include "xla_ffi.h"

namespace bindings {
namespace {

using namespace xla_ffi;

// Becomes an error of XLA.
struct Failure {
    ErrorCode code;
    std::string text;
};

[[noreturn]] void refuse(const std::string& text) { throw Failure{invalid_argument, text}; }

void check_call(ts_status_t status) {
    if (status == TS_SUCCESS) return;
    const bool is_argument =
        status == TS_INVALID_ARGUMENT || status == TS_INVALID_PATTERN || status == TS_WORKSPACE_TOO_SMALL;
    throw Failure{is_argument                  ? invalid_argument
                  : status == TS_UNSUPPORTED   ? unimplemented
                  : status == TS_OUT_OF_MEMORY ? exhausted
                                               : internal,
                  std::string("tilesparse: ") + ts_last_error()};
}

// How the text of an error of XLA's own functions is read differs between its releases.
void check_xla(const Call& call, Error* error, const char* what) {
    if (error == nullptr) return;
    DestroyError given{sizeof given, nullptr, error};
    call.api->destroy_error(&given);
    throw Failure{exhausted, std::string("tilesparse: XLA cannot ") + what};
}

int32_t dtype_of(DataType dtype) {
    switch (dtype) {
        case f64:
            return TS_FLOAT64;
        case f32:
            return TS_FLOAT32;
        case f16:
            return TS_FLOAT16;
        case bf16:
            return TS_BFLOAT16;
        case s8:
            return TS_INT8;
        default:
            refuse("tilesparse: operands must be float64, float32, float16, bfloat16 or int8");
    }
}

int64_t size_of(DataType dtype) { return dtype == f64 ? 8 : dtype == f32 ? 4 : dtype == s8 ? 1 : 2; }

// One call: its operands by place, its attributes by name.
class Arguments {
  public:
    explicit Arguments(const Call& call) : call_(call) {}

    const Buffer& argument(int64_t index, int64_t rank) const { return buffer(call_.arguments, index, rank); }
    const Buffer& result() const { return buffer(call_.results, 0, 0); }

    const int32_t* indices(int64_t index, int64_t size) const {
        const Buffer& array = argument(index, 1);
        if (array.dtype != s32 || array.dims[0] != size)
            refuse("tilesparse: an index array has another size");
        return static_cast<const int32_t*>(array.data);
    }

    int32_t operator[](std::string_view name) const {
        const Attributes& given = call_.attributes;
        for (int64_t i = 0; i < given.count; ++i) {
            if (std::string_view(given.names[i]->data, given.names[i]->size) != name) continue;
            const auto* scalar = static_cast<const Scalar*>(given.values[i]);
            if (given.types[i] == scalar_attribute && scalar->dtype == s32)
                return *static_cast<const int32_t*>(scalar->value);
        }
        refuse("tilesparse: no int32 attribute " + std::string(name));
    }

  private:
    static const Buffer& buffer(const Buffers& buffers, int64_t index, int64_t rank) {
        if (index >= buffers.count) refuse("tilesparse: too few operands");
        const Buffer& found = *buffers.buffers[index];
        if (rank != 0 && found.rank != rank) refuse("tilesparse: an operand has another rank");
        return found;
    }

    const Call& call_;
};

// Memory for the length of a call: XLA's on a GPU, where it follows the stream.
class Scratch {
  public:
    Scratch(const Call& call, int32_t device) : call_(call), device_(device) {}
    Scratch(const Scratch&) = delete;

    ~Scratch() {
        for (size_t i = 0; i < count_; ++i) {
            const auto [data, bytes] = taken_[i];
            if (device_ == TS_CPU) {
                ::operator delete(data, std::align_val_t(kAlignment));
                continue;
            }
            Free given{sizeof given, nullptr, call_.context, bytes, data};
            call_.api->free(&given);
        }
    }

    void* take(size_t bytes) {
        if (bytes == 0) return nullptr;
        if (device_ == TS_CPU) {
            void* data = ::operator new(bytes, std::align_val_t(kAlignment));
            taken_[count_++] = {data, bytes};
            return data;
        }
        bytes += kAlignment - kAlignmentOfXla;
        Allocate wanted{sizeof wanted, nullptr, call_.context, bytes, kAlignmentOfXla, nullptr};
        check_xla(call_, call_.api->allocate(&wanted), "allocate the workspace");
        taken_[count_++] = {wanted.data, bytes};
        const auto first = reinterpret_cast<uintptr_t>(wanted.data);
        return pointer<void>((first + kAlignment - 1) / kAlignment * kAlignment);
    }

  private:
    static constexpr size_t kAlignment = 256;
    static constexpr size_t kAlignmentOfXla = 16;  // the largest that it takes

    struct Taken {
        void* data;
        size_t bytes;
    };

    const Call& call_;
    int32_t device_;
    std::array<Taken, 3> taken_{};
    size_t count_ = 0;
};

// A stack of dense matrices, or of values, of which each product of a batch takes its own, or all the one.
struct Stack {
    const Buffer& buffer;
    int64_t stride;

    explicit Stack(const Buffer& given, int64_t batch) : buffer(given), stride(0) {
        int64_t size = size_of(given.dtype);
        for (int64_t i = 1; i < given.rank; ++i) size *= given.dims[i];
        if (given.dims[0] != 1 && given.dims[0] != batch) refuse("tilesparse: operands have other batches");
        if (given.dims[0] != 1) stride = size;
    }

    void* at(int64_t i) const { return static_cast<char*>(buffer.data) + i * stride; }
};

// Lays out a matrix [batch, tokens, features], or [batch, features, tokens] where it is column-major.
int64_t tokens_of(ts_operand& operand, const Buffer& buffer, int64_t features, int32_t layout) {
    const bool columns = layout == TS_COLUMN_MAJOR;
    if (buffer.rank != 3 || buffer.dims[columns ? 1 : 2] != features)
        refuse("tilesparse: a dense operand does not fit the shape");
    operand.layout = layout;
    operand.ld = buffer.dims[2];
    return buffer.dims[columns ? 2 : 1];
}

// Arguments: the two factors, [batch, …]; three arrays of the pattern, by column for TS_DDS_NN; a plan for
// the kernel of the attribute, or no bytes, which has the plan built here; for int8 scales of tokens and of
// outputs. Of int8 the result has another dtype.
void run(const Call& call, int32_t device) {
    const Arguments given(call);
    auto pattern = make<ts_pattern>();
    auto desc = make<ts_matmul_desc>();
    desc.op = given["op"];
    desc.device = device;
    desc.precision = device == TS_CUDA ? given["precision"] : 0;
    desc.kernel = given["kernel"];
    desc.pattern = &pattern;
    const bool samples = desc.op == TS_SDD_TN, by_column = desc.op == TS_DDS_NN;
    const Buffer& first = given.argument(0, 3);
    const Buffer& second = given.argument(1, samples ? 3 : 4);
    const Buffer& result = given.result();
    if (result.rank != (samples ? 4 : 3)) refuse("tilesparse: the result has another rank");
    const bool is_int8 = first.dtype == s8;
    if (first.dtype != second.dtype || (first.dtype == result.dtype) == is_int8)
        refuse("tilesparse: operands must have one dtype");
    const Buffer& values = samples ? result : second;
    pattern.nnz = values.dims[1];
    pattern.block_rows = static_cast<int32_t>(values.dims[2]);
    pattern.block_cols = static_cast<int32_t>(values.dims[3]);
    pattern.out_features = given["out_features"];
    pattern.in_features = given["in_features"];
    const auto lines_of = [](int64_t size, int32_t side) { return (size + side - 1) / std::max(side, 1); };
    const int64_t lines = by_column ? lines_of(pattern.in_features, pattern.block_cols)
                                    : lines_of(pattern.out_features, pattern.block_rows);
    const int32_t* ptr = given.indices(2, lines + 1);
    const int32_t* idx = given.indices(3, pattern.nnz);
    const int32_t* slot = given.indices(4, pattern.nnz);
    (by_column ? pattern.col_ptr : pattern.row_ptr) = ptr;
    (by_column ? pattern.row_idx : pattern.col_idx) = idx;
    (by_column ? pattern.col_slot : pattern.row_slot) = slot;

    const Buffer& x = by_column ? result : samples ? second : first;
    const Buffer& y = desc.op == TS_DDS_NT ? result : first;
    desc.tokens = tokens_of(desc.x, x, pattern.in_features, given["x_layout"]);
    if (tokens_of(desc.y, y, pattern.out_features, given["y_layout"]) != desc.tokens)
        refuse("tilesparse: the dense operands have other numbers of tokens");
    (by_column ? desc.y : desc.x).dtype = dtype_of(first.dtype);
    if (is_int8) {
        const Buffer& of_tokens = given.argument(6, 1);
        const Buffer& of_outputs = given.argument(7, 1);
        if (of_tokens.dtype != f32 || of_tokens.dims[0] != desc.tokens || of_outputs.dtype != f32 ||
            of_outputs.dims[0] != pattern.out_features)
            refuse("tilesparse: scales have another size");
        desc.x.granularity = TS_SCALES_PER_TOKEN;
        desc.x.scales = static_cast<const float*>(of_tokens.data);
        desc.values.dtype = TS_INT8;
        desc.values.granularity = TS_SCALES_PER_FEATURE;
        desc.values.scales = static_cast<const float*>(of_outputs.data);
        desc.y.dtype = dtype_of(result.dtype);
    }
    const int64_t batch = result.dims[0];
    const Stack xs(x, batch), ys(y, batch), all(values, batch);

    Scratch scratch(call, device);
    ts_stream_t stream = nullptr;
    if (device == TS_CUDA) {
        GetStream wanted{sizeof wanted, nullptr, call.context, nullptr};
        check_xla(call, call.api->get_stream(&wanted), "name its stream");
        stream = static_cast<ts_stream_t>(wanted.stream);
        if (desc.kernel == TS_KERNEL_DEFAULT) {
            auto info = make<ts_device_info>();
            check_call(ts_device_get(TS_CUDA, -1, &info));
            check_call(ts_matmul_select(&desc, &info, &desc.kernel, nullptr, 0));
        }
        const Buffer& plan = given.argument(5, 1);
        if (plan.dims[0] != 0) {
            desc.plan = {plan.data, static_cast<size_t>(plan.dims[0]), 0};
        } else {
            size_t bytes = 0, to_build = 0;
            check_call(ts_plan_device_size(&pattern, desc.kernel, desc.op, &bytes, &to_build));
            void* data = scratch.take(bytes);
            void* workspace = scratch.take(to_build);
            if (bytes != 0)
                check_call(ts_plan_device_build(&pattern, desc.kernel, desc.op, data, bytes, workspace,
                                                to_build, stream));
            desc.plan = {data, bytes, 0};
        }
        if (desc.plan.data != nullptr)
            check_call(ts_plan_key(&pattern, desc.kernel, desc.op, &desc.plan.key));
    }
    // Addresses decide nothing of a workspace; those of the first product stand for all.
    desc.x.data = x.data, desc.y.data = y.data, desc.values.data = values.data;
    size_t bytes = 0;
    check_call(ts_matmul_workspace_size(&desc, &bytes));
    void* workspace = scratch.take(bytes);
    for (int64_t i = 0; i < batch; ++i) {
        desc.x.data = xs.at(i), desc.y.data = ys.at(i), desc.values.data = all.at(i);
        check_call(ts_matmul(&desc, workspace, bytes, stream));
    }
}

Error* error_of(const Call& call, ErrorCode code, const char* text) {
    CreateError wanted{sizeof wanted, nullptr, text, code};
    return call.api->create_error(&wanted);
}

template <int32_t device>
Error* handle(Call* call) {
    for (Extension* extension = call->extensions; extension != nullptr; extension = extension->next) {
        if (extension->type != metadata_extension) continue;
        Metadata& metadata = *reinterpret_cast<MetadataExtension*>(extension)->metadata;
        // Appended fields are not touched, so any minor version will do. Releases of JAX below 0.7 do not
        // say which one they have, and have this one.
        metadata.version.major = major_version;
        metadata.version.minor = call->api == nullptr ? 1 : call->api->version.minor;
        metadata.traits = 0;
        return nullptr;
    }
    if (call->stage != execute) return nullptr;
    try {
        run(*call, device);
        return nullptr;
    } catch (const Failure& failure) {
        return error_of(*call, failure.code, failure.text.c_str());
    } catch (const std::bad_alloc&) {
        return error_of(*call, exhausted, "tilesparse: the host has no memory left");
    } catch (const std::exception& error) {
        return error_of(*call, internal, error.what());
    }
}

nb::capsule capsule_of(Handler* handler) {
    return nb::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
}

}  // namespace

void bind_jax(nb::module_& m) {
    const auto handler = [](int32_t device) {
        return capsule_of(device == TS_CUDA ? &handle<TS_CUDA> : &handle<TS_CPU>);
    };
    m.def("xla_handler", handler, "device"_a, nb::sig("def xla_handler(device: int) -> object"));
}

}  // namespace bindings
