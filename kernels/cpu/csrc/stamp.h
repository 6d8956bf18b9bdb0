// When each stage of a step ended: part of programs that are built to be timed, of no other.
//
// Rank 0 reads CLOCK_MONOTONIC, some 25 ns, when the step begins, when every rank is there, and after each stage, that is
// behind the barrier that ends it. What other ranks take longer is in the stage they take longer for.
#pragma once

#include <time.h>

#include "program.h"
#include "team.h"

namespace cllm {

struct Stamps {
  int64_t* begin = nullptr;  // nanoseconds
  int64_t* end = nullptr;
  int64_t* next = nullptr;
};

inline Stamps& stamps() {
  static Stamps all;
  return all;
}

inline void stamp(Team& team) {
  if (team.rank != 0) return;
  Stamps& all = stamps();
  if (all.next < all.end) {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    *all.next = now.tv_sec * 1000000000L + now.tv_nsec;
  }
  all.next++;  // also past the end, so that the caller sees how many there were
}

inline void begin_stamps(Team& team) {
  if (team.rank == 0) stamps().next = stamps().begin;
  stamp(team);
  team.sync();  // ranks that slept wake up: no time of the first stage
  stamp(team);
}

}  // namespace cllm

// Where stamps of the steps to come go, and how many fit.
CLLM_EXPORT void cllm_stamps(int64_t* where, int64_t count) { cllm::stamps() = {where, where + count, where}; }

// How many the last step had.
CLLM_EXPORT int64_t cllm_stamped() { return cllm::stamps().next - cllm::stamps().begin; }
