// The threads that compute a product: those of the OpenMP runtime that the process has, so that a program has
// one pool of threads, whatever PyTorch's copy of the runtime is called and wherever it lies.
#pragma once

#include <algorithm>
#include <atomic>
#include <barrier>
#include <cstdint>

namespace ts {

// Processors that the process may use: fixed, unlike the number of threads, so that the size of a workspace
// stays valid.
int processors();

// The most threads of a region that the calling thread begins.
int max_threads();

// State shared by the threads of a region.
struct Team {
    static constexpr int kRanges = 64;  // of indices; threads beyond them have none of their own
    struct alignas(64) Counter {
        std::atomic<int64_t> next = 0;
    };

    Counter counters[2][kRanges];       // of two loops in turn
    std::barrier<>* barrier = nullptr;  // of threads that no runtime has started
};

// One thread of a region. All threads of a team go through the same loops. In each a thread has neighbouring
// indices, the same in every loop of as many: its core may still hold what it has read and written for them,
// which would come from afar to another, and no other core writes next to it at the same time.
class Member {
  public:
    Member(Team& team, int thread, int threads) : team_(team), thread_(thread), threads_(threads) {}

    int thread() const { return thread_; }
    int threads() const { return threads_; }

    // The same, of a team that it is alone in, whatever region it is in.
    explicit Member(Team& own) : Member(own, 0, 1) {}

    // Returns when all threads of the team are here.
    void wait() const;

    // Calls body(i) for the indices of this thread, and waits for nobody.
    template <class Body>
    void share(int64_t count, const Body& body) const {
        const int64_t end = count * (thread_ + 1) / threads_;
        for (int64_t i = count * thread_ / threads_; i < end; ++i) body(i);
    }

    // Calls body(i, round) in one round after another for the indices of this thread, then for what others
    // have not begun, and returns when all threads are done.
    template <class Body>
    void draw(int64_t count, int64_t rounds, const Body& body) {
        const int ranges = std::min(threads_, Team::kRanges);
        auto& counters = team_.counters[loop_++ % 2];
        // For the next loop: all threads are done with the one before.
        if (thread_ < ranges) team_.counters[loop_ % 2][thread_].next.store(0, std::memory_order_relaxed);
        for (int k = 0; k < ranges; ++k) {
            const int range = (thread_ + k) % ranges;
            const int64_t begin = count * range / ranges, length = count * (range + 1) / ranges - begin;
            std::atomic<int64_t>& next = counters[range].next;
            // Looking first, since an addition takes the counter from the others.
            while (next.load(std::memory_order_relaxed) < length * rounds)
                if (const int64_t i = next.fetch_add(1, std::memory_order_relaxed); i < length * rounds)
                    body(begin + i % length, i / length);
        }
        wait();
    }

  private:
    Team& team_;
    const int thread_, threads_;
    int loop_ = 0;
};

void run_region(int threads, void (*function)(const void* body, Member& member), const void* body);

// Calls body(member) in up to `threads` threads, and returns when all are done.
template <class Body>
void in_parallel(int threads, const Body& body) {
    run_region(
        threads, [](const void* data, Member& member) { (*static_cast<const Body*>(data))(member); }, &body);
}

// Calls body(i) for every index, in as many threads as there may be.
template <class Body>
void for_each(int64_t count, const Body& body) {
    in_parallel(max_threads(), [&](Member& member) { member.share(count, body); });
}

}  // namespace ts
