#include "engine/scheduling.h"

#include <algorithm>

#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/tls.h"
#include "engine/tracker_lock.h"

namespace heddle::engine {
namespace {

HEDDLE_TLS bool tls_prompt = false;

// linux/sched/types.h, which older C libraries do not wrap.
struct SchedAttr {
  std::uint32_t size;
  std::uint32_t policy;
  std::uint64_t flags;
  std::int32_t nice;
  std::uint32_t priority;
  std::uint64_t runtime_ns;  // of SCHED_OTHER: the slice
  std::uint64_t deadline_ns;
  std::uint64_t period_ns;
};

constexpr std::uint64_t kSliceNs = 100'000;  // the shortest that the kernel takes

}  // namespace

void PreferPromptWakeups() noexcept {
  if (tls_prompt) return;
  tls_prompt = true;
#if defined(SYS_sched_getattr) && defined(SYS_sched_setattr)
  SchedAttr attributes{};
  if (syscall(SYS_sched_getattr, 0, &attributes, sizeof(attributes), 0) != 0) return;
  if (attributes.policy != 0) return;  // the host program chose another policy
  attributes.size = sizeof(attributes);
  attributes.runtime_ns = kSliceNs;
  // Older kernels refuse it, and everything works without.
  static_cast<void>(syscall(SYS_sched_setattr, 0, &attributes, 0));
#endif
}

void PreferExactTimers() noexcept { prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); }

int PausesPerMicrosecond() noexcept {
  static const int pauses = [] {
    constexpr int kSample = 200;
    std::int64_t best_ns = 1'000'000;
    for (int repeat = 0; repeat < 5; ++repeat) {
      const std::int64_t start = SteadyNowNs();
      for (int i = 0; i < kSample; ++i) Pause();
      best_ns = std::min(best_ns, SteadyNowNs() - start);
    }
    return std::clamp(
        static_cast<int>(std::int64_t{kSample} * 1000 / std::max<std::int64_t>(best_ns, 1)), 1,
        1000);
  }();
  return pauses;
}

}  // namespace heddle::engine
