#include "kvstore/dist/on_terminate.h"

#include <chrono>
#include <cstdlib>
#include <exception>
#include <future>
#include <memory>
#include <thread>
#include <typeinfo>
#include <utility>

#include <cxxabi.h>

namespace heddle::kvstore::dist {

namespace {

constexpr std::chrono::seconds kReportWait{2};

// Constant after ReportOnTerminate.
std::terminate_handler previous = nullptr;
void (*reporter)(const std::string& why) = nullptr;

std::string NameOf(const std::type_info& type) {
  int status = 0;
  const std::unique_ptr<char, decltype(&std::free)> name(
      abi::__cxa_demangle(type.name(), nullptr, nullptr, &status), &std::free);
  return name != nullptr ? name.get() : type.name();
}

std::string WhyTerminated() {
  const std::exception_ptr exception = std::current_exception();
  const std::type_info* const type = abi::__cxa_current_exception_type();
  if (exception == nullptr || type == nullptr) return "its program called std::terminate";
  const std::string name = NameOf(*type);
  try {
    std::rethrow_exception(exception);
  } catch (const std::exception& e) {
    return "its program ended by an uncaught exception: " + name + ": " + e.what();
  } catch (...) {
    return "its program ended by an uncaught exception: " + name;
  }
}

[[noreturn]] void OnTerminate() {
  try {
    // Shared with the thread, which may be left behind.
    auto done = std::make_shared<std::promise<void>>();
    std::future<void> reported = done->get_future();
    std::thread([done = std::move(done), why = WhyTerminated()] {
      reporter(why);
      done->set_value();
    }).detach();
    reported.wait_for(kReportWait);
  } catch (...) {  // NOLINT(bugprone-empty-catch): the others see the connection's end
  }
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

void ReportOnTerminate(void (*report)(const std::string& why)) {
  reporter = report;
  previous = std::get_terminate();
  std::set_terminate(&OnTerminate);
}

}  // namespace heddle::kvstore::dist
