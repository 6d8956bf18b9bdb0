// A team of threads that runs one step together, and the pool that keeps the threads between steps.
//
// run_team(n, fn, arg): the caller is rank 0, the pool's workers are ranks 1..n-1; returns when all are done.
// Idle workers spin for kSpinMicroseconds, then sleep on a futex. Between dependent stages call team.sync(), a
// sense-reversing barrier that spins briefly and then sleeps (the machine may be shared).
//
// A pool belongs to a shared object and to a process: after fork() the child makes new workers.
#pragma once

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <mutex>

#include "vec.h"

namespace cllm {

constexpr int kMaxThreads = 256;
constexpr int kScratchSlots = 6;
constexpr long kSpinMicroseconds = 50;
constexpr int kBarrierSpins = 2000;  // of a pause, 40 to 70 ns each: about 100 microseconds

CLLM_INLINE void cpu_pause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#endif
}

// A growing buffer, 64-byte aligned; its contents do not survive growth.
struct Scratch {
  void* data = nullptr;
  size_t bytes = 0;
  void* reserve(size_t need) {
    if (need > bytes) {
      free(data);
      bytes = (need + 4095) / 4096 * 4096;
      data = aligned_alloc(4096, bytes);
      if (!data) abort();  // out of memory inside a step: nothing can be finished
    }
    return data;
  }
};

struct alignas(64) Seat {  // one rank's private state
  Scratch scratch[kScratchSlots];
};

// One operation on a word that threads sleep on.
inline long futex(std::atomic<int>* word, int op, int value) {
  return syscall(SYS_futex, reinterpret_cast<int*>(word), op, value, nullptr, nullptr, 0);
}

struct Shared {
  alignas(64) std::atomic<int> waiting{0};
  alignas(64) std::atomic<int> sense{0};
  alignas(64) std::atomic<int> sleepers{0};
  Scratch common[2];  // shared by all ranks; sized by rank 0
  Seat seats[kMaxThreads];
};

struct Team {
  int rank = 0, size = 1;
  int sense = 0;
  Shared* shared = nullptr;

  // All ranks meet; memory written before is visible after. Whoever waits spins for a few stages' worth of time, then
  // sleeps: where another process has a rank's core, a sleeping rank leaves its own core idle, and the scheduler moves
  // the delayed rank there at once. Spinning on would keep both waiting for whole time slices.
  void sync() {
    if (size == 1) return;
    sense ^= 1;
    if (shared->waiting.fetch_add(1, std::memory_order_acq_rel) == size - 1) {
      shared->waiting.store(0, std::memory_order_relaxed);
      shared->sense.store(sense, std::memory_order_seq_cst);
      if (shared->sleepers.load(std::memory_order_seq_cst) > 0) futex(&shared->sense, FUTEX_WAKE_PRIVATE, kMaxThreads);
      return;
    }
    for (int spins = 0; spins < kBarrierSpins; spins++) {
      if (shared->sense.load(std::memory_order_acquire) == sense) return;
      cpu_pause();
    }
    shared->sleepers.fetch_add(1, std::memory_order_seq_cst);
    while (shared->sense.load(std::memory_order_seq_cst) != sense) futex(&shared->sense, FUTEX_WAIT_PRIVATE, sense ^ 1);
    shared->sleepers.fetch_sub(1, std::memory_order_seq_cst);
  }

  // `count` elements private to this rank, valid until the next request for the same slot.
  template <class T>
  T* scratch(int slot, size_t count) {
    return (T*)shared->seats[rank].scratch[slot].reserve(count * sizeof(T));
  }
  void* peer_scratch(int peer, int slot) { return shared->seats[peer].scratch[slot].data; }

  // Memory seen by all ranks; every rank calls it with the same size. Syncs twice.
  void* common(int slot, size_t bytes) {
    sync();
    if (rank == 0) shared->common[slot].reserve(bytes);
    sync();
    return shared->common[slot].data;
  }
};

struct Range {
  int begin, end;
};

// This rank's part of [0, total): parts differ by at most one.
CLLM_INLINE Range split(int total, const Team& team) {
  return {int(int64_t(total) * team.rank / team.size), int(int64_t(total) * (team.rank + 1) / team.size)};
}

using TeamFn = void (*)(Team&, void*);

// AMX tiles belong to a process only after it asked the kernel for them, once.
inline bool amx_permitted() {
#if CLLM_AMX
  constexpr int kRequestPermission = 0x1023, kTileData = 18;
  static const bool ok = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return ok;
#else
  return true;
#endif
}

class Pool {
 public:
  static Pool& get() {
    static Pool* pool = nullptr;
    static pid_t owner = 0;
    static std::mutex guard;
    std::lock_guard<std::mutex> lock(guard);
    if (!pool || owner != getpid()) {  // a forked child inherits memory but no threads: the old pool is left alone
      pool = new Pool();
      owner = getpid();
    }
    return *pool;
  }

  void run(int n, TeamFn fn, void* arg) {
    if (n < 1) n = 1;
    if (n > kMaxThreads) n = kMaxThreads;
    std::lock_guard<std::mutex> lock(busy_);
    amx_permitted();
    while (started_ < n) start_worker(started_++);
    shared_.waiting.store(0, std::memory_order_relaxed);
    shared_.sense.store(0, std::memory_order_relaxed);
    fn_ = fn;
    arg_ = arg;
    size_ = n;
    done_.store(0, std::memory_order_relaxed);
    if (n > 1) {
      epoch_.fetch_add(1, std::memory_order_seq_cst);
      if (sleepers_.load(std::memory_order_seq_cst) > 0) futex(&epoch_, FUTEX_WAKE_PRIVATE, kMaxThreads);
    }
    act(0);
    for (unsigned spins = 1; done_.load(std::memory_order_acquire) != started_ - 1 && n > 1; spins++) {
      cpu_pause();
      if ((spins & 0xfff) == 0) sched_yield();
    }
  }

 private:
  struct Start {
    Pool* pool;
    int rank;
    int epoch;
  };


  void act(int rank) {
    Team team;
    team.rank = rank;
    team.size = size_;
    team.shared = &shared_;
    fn_(team, arg_);
#if CLLM_AMX
    _tile_release();  // live tiles would slow every later context switch
#endif
  }

  void start_worker(int rank) {
    if (rank == 0) return;
    Start* start = new Start{this, rank, epoch_.load()};
    pthread_t thread;
    pthread_attr_t attr;
    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    if (pthread_create(&thread, &attr, &Pool::work, start) != 0) abort();
    pthread_attr_destroy(&attr);
  }

  static void* work(void* raw) {
    Start start = *(Start*)raw;
    delete (Start*)raw;
    Pool& pool = *start.pool;
    for (int seen = start.epoch;;) {
      seen = pool.wait(seen);
      // Every started worker reports, also those with no part in this run, so that none can still be reading
      // fn_ and size_ when the next run changes them.
      if (start.rank < pool.size_) pool.act(start.rank);
      pool.done_.fetch_add(1, std::memory_order_acq_rel);
    }
    return nullptr;
  }

  int wait(int seen) {
    timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (unsigned spins = 1;; spins++) {
      int epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
      cpu_pause();
      if ((spins & 63) == 0) {
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - begin.tv_sec) * 1000000000L + now.tv_nsec - begin.tv_nsec > kSpinMicroseconds * 1000) break;
      }
    }
    for (;;) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      if (epoch_.load(std::memory_order_seq_cst) == seen) futex(&epoch_, FUTEX_WAIT_PRIVATE, seen);
      sleepers_.fetch_sub(1, std::memory_order_seq_cst);
      int epoch = epoch_.load(std::memory_order_acquire);
      if (epoch != seen) return epoch;
    }
  }

  Shared shared_;
  std::mutex busy_;
  alignas(64) std::atomic<int> epoch_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  alignas(64) std::atomic<int> done_{0};
  TeamFn fn_ = nullptr;
  void* arg_ = nullptr;
  int size_ = 1;
  int started_ = 1;  // ranks with a thread; rank 0 is the caller
};

inline void run_team(int n, TeamFn fn, void* arg) { Pool::get().run(n, fn, arg); }

}  // namespace cllm
