// Devices of this machine.
#pragma once

#include <string>

#include "common/problem.h"

namespace ts {

struct NamedDevice {
    Device properties;
    std::string name;
};

const NamedDevice& cpu_device();

// Properties of a CUDA device, -1 for the current one; read once per device. Of the current one also which
// clusters it has room for, of which only it can be asked. Throws TS_NO_DEVICE where there is no driver, no
// such device or no CUDA in the library.
const NamedDevice& cuda_device(int32_t ordinal);

// Throws TS_NO_DEVICE in a library that was built without CUDA, and says how to get one with the kernels.
[[noreturn]] void fail_without_cuda();

// Errors of the CUDA runtime stay with the thread until it asks for the last one. What is reported here must
// not surface in a later call; an error that was there before is the caller's and must.
class LastError {
  public:
    LastError();  // before the first call
    // An error that one has returned since.
    void forget(int32_t code) const;

  private:
    int32_t before_;
};

// The place where a kernel, by its number, reports that its plan was another one; memory of the process.
PlanReport plan_report(int32_t kernel);

// Throws TS_STALE_PLAN, once, if a kernel that has run reported one. Waits for none.
void check_plans();

// Throws TS_CUDA_ERROR unless the code of a launch is 0.
void check_launch(int32_t code, const char* kernel, const LastError& last_error);

// Calls launch() for its code.
template <class Launch>
void launch_checked(const char* kernel, Launch launch) {
    const LastError last_error;
    check_launch(launch(), kernel, last_error);
}

}  // namespace ts
