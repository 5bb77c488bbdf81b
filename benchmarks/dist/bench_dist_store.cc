// The store dist_sync, its processes on loopback, beside sockets that move the same bytes.
//
//   bench_dist_store [--json FILE] [--quick] [SECTION...]
//
// One worker and one server:
// latency  pushpull of 4 KiB until it can be read, back to back and with pauses of 500 us, beside a
//          bare Boost.Asio echo; both on one CPU, and on a CPU each.
// polling  the same where both sides poll before they sleep, against fixed limits.
// large    pushpull of 1, 16 and 64 MiB, beside plain sockets by slices; time and CPU seconds.
// small    1 000 keys of 256 bytes pushed and pulled, all in a call and a call each, beside one
//          round trip each.
// urgent   4 KiB behind 20 MB of lower priority, beside 4 KiB alone, and the 20 MB alone.
// bytes    what TCP carries beyond the values, counted on the sockets.
//
// Two workers:
// sum      pushpull of 64 MiB to one server, beside plain sockets between as many processes.
// resnet   161 keys with the sizes of ResNet-50's parameters, SGD on two servers.
//
// Contenders run in turn, see turns.h. Status: see sections.h.
#include "benchmarks/dist/sections.h"
#include "benchmarks/dist/store_sections.h"

int main(int argc, char** argv) {
  using namespace heddle::bench_dist;  // NOLINT(google-build-using-namespace)
  constexpr Section kSections[] = {
      {"latency", &MeasureLatency}, {"polling", &MeasurePolling}, {"large", &MeasureLarge},
      {"small", &MeasureSmall},     {"urgent", &MeasureUrgent},   {"bytes", &MeasureBytes},
      {"sum", &MeasureSum},         {"resnet", &MeasureResNet},
  };
  return RunSections(argc, argv, kSections);
}
