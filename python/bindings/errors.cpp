#include <new>

#include "support.h"

namespace bindings {
namespace {

const char* error_class(ts_status_t status) {
    switch (status) {
        case TS_INVALID_ARGUMENT:
        case TS_WORKSPACE_TOO_SMALL:
            return "InvalidArgumentError";
        case TS_INVALID_PATTERN:
            return "InvalidPatternError";
        case TS_UNSUPPORTED:
            return "UnsupportedError";
        case TS_NO_DEVICE:
            return "NoDeviceError";
        case TS_CUDA_ERROR:
            return "CudaError";
        case TS_STALE_PLAN:
            return "PatternChangedError";
        default:
            return "InternalError";
    }
}

}  // namespace

void check(ts_status_t status) {
    if (status == TS_SUCCESS) return;
    if (status == TS_OUT_OF_MEMORY) throw std::bad_alloc();
    const nb::object type = nb::module_::import_("tilesparse.errors").attr(error_class(status));
    PyErr_SetString(type.ptr(), ts_last_error());
    throw nb::python_error();
}

}  // namespace bindings
