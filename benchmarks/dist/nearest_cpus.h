// Which two CPUs are near one another.
//
// What two processes exchange through memory goes from cache to cache. Between cores of a server
// CPU that share a third-level cache a line went there and back in 0.1 us, between others in 0.5
// us; 4 KiB, by bare copies, in 0.5 and in 3.6 us. Which CPUs of a virtual machine are near changes
// within seconds, as its host moves them.
#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <utility>
#include <vector>

namespace heddle::bench_dist {

struct CpuPair {
  int first = 0;  // counted among those that the program was given, see processes.h
  int second = 1;
  double round_trip_ns = 0;  // of a cache line
  // Both are threads of one core: a computing loop takes longer on one while the other has work,
  // too. A line passes sooner between those, but the two halves of a job share what one would have.
  bool one_core = false;
};

// The two, of the first eight that the program was given and if possible of two cores, between
// which a cache line goes there and back soonest; it takes a millisecond a pair. The calling thread
// may run where it might before.
CpuPair NearestCpus();

// Keeps a client, which is this process, and its servers on the two CPUs that are nearest.
class NearbyPlaces {
 public:
  // Cores that are as near share a cache.
  static constexpr double kNearNs = 200;
  static constexpr std::chrono::seconds kPatience{1};

  explicit NearbyPlaces(std::function<void(int cpu)> pin_servers)
      : pin_servers_(std::move(pin_servers)) {}

  // Looks anew, and again while none are near, for kPatience at most; before each round.
  void Take();
  // What the bars say of it: "CPUs 0.12 us apart".
  std::string text() const;

 private:
  const std::function<void(int cpu)> pin_servers_;
  CpuPair pair_{.first = kNowhere, .second = kNowhere};
  std::vector<double> round_trips_ns_;

  static constexpr int kNowhere = -2;
};

}  // namespace heddle::bench_dist
