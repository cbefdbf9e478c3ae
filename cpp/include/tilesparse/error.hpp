// Errors of the C++ layer: one class for each status of the C interface.
#ifndef TILESPARSE_ERROR_HPP_
#define TILESPARSE_ERROR_HPP_

#include <tilesparse/tilesparse.h>

#include <cstdint>
#include <stdexcept>
#include <string>

namespace tilesparse {
inline namespace v0_1 {

class Error : public std::runtime_error {
  public:
    Error(ts_status_t status, const std::string& text) : std::runtime_error(text), status_(status) {}
    ts_status_t status() const noexcept { return status_; }

  private:
    ts_status_t status_;
};

class InvalidArgumentError : public Error {
  public:
    explicit InvalidArgumentError(const std::string& text)
        : InvalidArgumentError(TS_INVALID_ARGUMENT, text) {}

  protected:
    using Error::Error;
};

// The arrays of a pattern break one of its rules.
class InvalidPatternError : public InvalidArgumentError {
  public:
    explicit InvalidPatternError(const std::string& text) : InvalidArgumentError(TS_INVALID_PATTERN, text) {}
};

// Valid, but no kernel of the library computes it on that device.
class UnsupportedError : public Error {
  public:
    explicit UnsupportedError(const std::string& text) : Error(TS_UNSUPPORTED, text) {}
};

// No usable CUDA device, or a library built without CUDA.
class NoDeviceError : public Error {
  public:
    explicit NoDeviceError(const std::string& text) : Error(TS_NO_DEVICE, text) {}
};

class WorkspaceTooSmallError : public Error {
  public:
    explicit WorkspaceTooSmallError(const std::string& text) : Error(TS_WORKSPACE_TOO_SMALL, text) {}
};

class CudaError : public Error {
  public:
    explicit CudaError(const std::string& text) : Error(TS_CUDA_ERROR, text) {}
};

// The library ran out of host memory. Containers and HostMemory throw std::bad_alloc.
class OutOfMemoryError : public Error {
  public:
    explicit OutOfMemoryError(const std::string& text) : Error(TS_OUT_OF_MEMORY, text) {}
};

// An earlier product on a GPU found another plan than its own and wrote no results; see ts_plan_check.
class StalePlanError : public Error {
  public:
    explicit StalePlanError(const std::string& text) : Error(TS_STALE_PLAN, text) {}
};

// A defect of the library, or a status that this header does not know.
class InternalError : public Error {
  public:
    explicit InternalError(const std::string& text) : Error(TS_INTERNAL_ERROR, text) {}
};

// The library that is loaded has another ABI than the header the program was compiled with.
class VersionError : public Error {
  public:
    explicit VersionError(const std::string& text) : Error(TS_UNSUPPORTED, text) {}
};

// Throws the error of a status that is not TS_SUCCESS, with this thread's ts_last_error().
inline void check(ts_status_t status) {
    const auto text = [] { return std::string(ts_last_error()); };
    switch (status) {
        case TS_SUCCESS:
            return;
        case TS_INVALID_ARGUMENT:
            throw InvalidArgumentError(text());
        case TS_INVALID_PATTERN:
            throw InvalidPatternError(text());
        case TS_UNSUPPORTED:
            throw UnsupportedError(text());
        case TS_NO_DEVICE:
            throw NoDeviceError(text());
        case TS_WORKSPACE_TOO_SMALL:
            throw WorkspaceTooSmallError(text());
        case TS_CUDA_ERROR:
            throw CudaError(text());
        case TS_OUT_OF_MEMORY:
            throw OutOfMemoryError(text());
        case TS_STALE_PLAN:
            throw StalePlanError(text());
        default:
            throw InternalError(text());
    }
}

// Throws VersionError where header and library do not belong together; all that calls the library calls it.
inline void check_version() {
    const int32_t abi = ts_abi_version();
    if (abi == TS_ABI_VERSION) return;
    throw VersionError(
        std::string("this program was compiled with the header of tilesparse " TS_VERSION ", ABI ") +
        std::to_string(TS_ABI_VERSION) + ", but the library that is loaded is " + ts_version() + ", ABI " +
        std::to_string(abi) + "; compile it with the header of that library, or " +
        (abi < TS_ABI_VERSION ? "install a newer library" : "install an older library"));
}

namespace detail {
inline void require(bool holds, const std::string& text) {
    if (!holds) throw InvalidArgumentError(text);
}
inline std::string text(int64_t number) { return std::to_string(number); }
}  // namespace detail

}  // namespace v0_1
}  // namespace tilesparse

#endif  // TILESPARSE_ERROR_HPP_
