// Asynchronous copies and the barriers that track them, as sm_80 has them: mbarriers without
// try_wait, filled by cp.async of many threads.
#pragma once

#include <cstdint>

namespace ts::sm80 {

__device__ inline uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Unless the condition is false, copies `bytes` (0 to kBytes, which is 4 or 16) from global to shared
// memory and fills the rest of kBytes with zeros; 16 go past L1. Without a branch, which would cut the code
// around it in two.
template <int kBytes = 16>
__device__ inline void copy_async_if(bool condition, uint32_t target, const void* source,
                                     int bytes = kBytes) {
    if constexpr (kBytes == 16)
        asm volatile(
            "{ .reg .pred copy; setp.ne.b32 copy, %2, 0; @copy cp.async.cg.shared.global [%0], [%1], 16, %3; "
            "}" ::"r"(target),
            "l"(source), "r"(static_cast<int>(condition)), "r"(bytes));
    else
        asm volatile(
            "{ .reg .pred copy; setp.ne.b32 copy, %2, 0; @copy cp.async.ca.shared.global [%0], [%1], %4, %3; "
            "}" ::"r"(target),
            "l"(source), "r"(static_cast<int>(condition)), "r"(bytes), "n"(kBytes));
}

// Until all that this thread copies has landed.
__device__ inline void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// The address of an mbarrier in shared memory.
class Barrier {
  public:
    __device__ explicit Barrier(uint32_t address) : address_(address) {}

    __device__ void init(int arrivals) const {
        asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(address_), "r"(arrivals));
    }
    __device__ void arrive() const {
        asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(address_)
                     : "memory");
    }
    // Arrives once all copies this thread has started so far have landed.
    __device__ void arrive_after_copies() const {
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address_) : "memory");
    }
    __device__ void wait(uint32_t parity) const {
        while (!test(parity)) {
        }
    }
    __device__ bool test(uint32_t parity) const {
        uint32_t done;
        asm volatile(
            "{ .reg .pred done; mbarrier.test_wait.parity.shared.b64 done, [%1], %2; selp.u32 %0, 1, 0, "
            "done; }"
            : "=r"(done)
            : "r"(address_), "r"(parity)
            : "memory");
        return done != 0;
    }

  private:
    uint32_t address_;
};

// A position in a ring of stages and the parity of its current round.
struct RingPosition {
    int stage = 0;
    uint32_t parity = 0;

    __device__ void advance(int stages) {
        if (++stage == stages) stage = 0, parity ^= 1;
    }
};

// Barriers [stages][full, empty], of 8 bytes, of a ring of stages that some threads fill and some, perhaps
// the same, release.
class Ring {
  public:
    __device__ Ring(uint32_t address, int stages) : address_(address), stages_(stages) {}

    static constexpr int bytes(int stages) { return stages * 16; }

    __device__ void init(int fill, int release) const {
        for (int stage = 0; stage < stages_; ++stage) {
            full(stage).init(fill);
            empty(stage).init(release);
        }
    }
    __device__ Barrier full(int stage) const { return Barrier(address_ + 16 * stage); }
    __device__ Barrier empty(int stage) const { return Barrier(address_ + 16 * stage + 8); }
    __device__ int stages() const { return stages_; }

  private:
    uint32_t address_;
    int stages_;
};

}  // namespace ts::sm80
