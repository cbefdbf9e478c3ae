#include "threads.h"

#include <dlfcn.h>
#include <sched.h>
#include <sys/auxv.h>

#include <algorithm>
#include <barrier>
#include <exception>
#include <latch>
#include <thread>
#include <vector>

namespace ts {
namespace {

// The entry points of an OpenMP runtime that are called: GNU's, or another that offers GNU's entry points, as
// LLVM's and Intel's do.
struct Runtime {
    void (*parallel)(void (*function)(void*), void* data, unsigned threads, unsigned flags) = nullptr;
    void (*barrier)() = nullptr;
    int (*max_threads)() = nullptr;
    int (*num_threads)() = nullptr;
    int (*thread_num)() = nullptr;
    int (*num_procs)() = nullptr;
};

template <class Function>
bool find(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
    return function != nullptr;
}

// The runtime of the process, or else the system's. PyTorch makes its own visible to all, under a name that
// may hold a checksum: so it is looked for by what it offers. Linking to it would mean a second copy, with
// threads of its own. A static program, which has no dynamic linker, cannot load one that uses the C library.
Runtime find_runtime() {
    if (getauxval(AT_BASE) == 0) return {};
    void* library = nullptr;
    Dl_info info;
    if (void* visible = dlsym(RTLD_DEFAULT, "GOMP_parallel"); visible != nullptr && dladdr(visible, &info))
        library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) library = dlopen("libgomp.so.1", RTLD_LAZY);
    Runtime found;
    const bool complete = library != nullptr && find(library, "GOMP_parallel", found.parallel) &&
                          find(library, "GOMP_barrier", found.barrier) &&
                          find(library, "omp_get_max_threads", found.max_threads) &&
                          find(library, "omp_get_num_threads", found.num_threads) &&
                          find(library, "omp_get_thread_num", found.thread_num) &&
                          find(library, "omp_get_num_procs", found.num_procs);
    return complete ? found : Runtime{};
}

const Runtime& runtime() {
    static const Runtime found = find_runtime();
    return found;
}

struct Region {
    Team team;
    void (*function)(const void*, Member&);
    const void* body;
};

// In every thread of the runtime's team, whose size it decides.
void enter(void* data) {
    Region& region = *static_cast<Region*>(data);
    Member member(region.team, runtime().thread_num(), runtime().num_threads());
    region.function(region.body, member);
}

// Without an OpenMP runtime in the process there is no pool to share: threads that live as long as the
// region, fewer where the system starts no more.
void run_own_threads(int threads, Region& region) {
    std::latch begin(1);
    std::vector<std::jthread> others;
    const auto run = [&](int thread) {
        begin.wait();
        Member member(region.team, thread, static_cast<int>(others.size()) + 1);
        region.function(region.body, member);
    };
    try {
        others.reserve(threads - 1);
        for (int thread = 1; thread < threads; ++thread) others.emplace_back(run, thread);
    } catch (const std::exception&) {  // there is no memory for more, or the system starts none
    }
    std::barrier<> barrier(others.size() + 1);
    region.team.barrier = &barrier;
    begin.count_down();
    run(0);
    others.clear();  // joins them, while the barrier is still there
}

int count_processors() {
    cpu_set_t set;
    const bool known = sched_getaffinity(0, sizeof set, &set) == 0;
    return known ? CPU_COUNT(&set) : std::max<int>(std::thread::hardware_concurrency(), 1);
}

}  // namespace

int processors() {
    static const int count = runtime().num_procs != nullptr ? runtime().num_procs() : count_processors();
    return count;
}

int max_threads() { return runtime().max_threads != nullptr ? runtime().max_threads() : processors(); }

void Member::wait() const {
    if (threads_ == 1) return;  // the region, if it is another team's, may have more
    if (team_.barrier == nullptr)
        runtime().barrier();
    else
        team_.barrier->arrive_and_wait();
}

void run_region(int threads, void (*function)(const void*, Member&), const void* body) {
    Region region{{}, function, body};
    if (runtime().parallel != nullptr)
        runtime().parallel(enter, &region, threads, 0);
    else
        run_own_threads(threads, region);
}

}  // namespace ts
