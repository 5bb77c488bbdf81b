// What kills a process by std::terminate: an exception that nobody catches, above all.
#pragma once

#include <string>

namespace heddle::kvstore::dist {

// From now on std::terminate first calls `report` with why it was called, as in "its program ended
// by an uncaught exception: std::runtime_error: out of luck": on a thread of its own, since the one
// that ends may hold any lock, and for two seconds at most. Then the handler of before goes on.
// Once a process.
void ReportOnTerminate(void (*report)(const std::string& why));

}  // namespace heddle::kvstore::dist
