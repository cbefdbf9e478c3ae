#include "sm80/select.h"

#include "common/estimate.h"

namespace ts::sm80 {

double estimate_dds(const Kernel& kernel, const Problem& problem, const Device& device) {
    return estimate(kernel, problem, device);
}

double estimate_sdd(const Kernel& kernel, const Problem& problem, const Device& device) {
    return estimate(kernel, problem, device);
}

double estimate_decode(const Kernel& kernel, const Problem& problem, const Device& device) {
    return estimate(kernel, problem, device);
}

}  // namespace ts::sm80
