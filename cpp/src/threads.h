// The threads that compute a product: those of the OpenMP runtime that the process has, so that a program has
// one pool of threads, whatever PyTorch's copy of the runtime is called and wherever it lies.
#pragma once

#include <atomic>
#include <barrier>
#include <cstdint>

namespace ts {

// Processors that the process may use: fixed, unlike the number of threads, so that the size of a workspace
// stays valid.
int processors();

// How many threads a region that the calling thread begins has at most.
int max_threads();

// What the threads of a region share.
struct Team {
    std::atomic<int64_t> next = 0;      // the first number that no thread has drawn
    std::barrier<>* barrier = nullptr;  // of threads that no runtime has started
};

// One thread of a region. All threads of a team go through the same loops.
class Member {
  public:
    Member(Team& team, int thread, int threads) : team_(team), thread_(thread), threads_(threads) {}

    int thread() const { return thread_; }
    int threads() const { return threads_; }

    // Returns when all threads of the team are here.
    void wait() const;

    // Calls body(i) for the indices of this thread, which are neighbours, and waits for nobody.
    template <class Body>
    void share(int64_t count, const Body& body) const {
        const int64_t end = count * (thread_ + 1) / threads_;
        for (int64_t i = count * thread_ / threads_; i < end; ++i) body(i);
    }

    // Calls body(i) for one index after another, whichever is next, and returns when all threads are done.
    // Every thread draws one number more than it computes, so that the next loop's begin at the same one for
    // all of them.
    template <class Body>
    void draw(int64_t count, const Body& body) {
        for (int64_t i; (i = team_.next.fetch_add(1, std::memory_order_relaxed) - drawn_) < count;) body(i);
        drawn_ += count + threads_;
        wait();
    }

  private:
    Team& team_;
    const int thread_, threads_;
    int64_t drawn_ = 0;
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
