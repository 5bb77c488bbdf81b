// What is thrown, for tests of all folders.
#pragma once

#include <heddle/error.h>

#include <exception>
#include <string>

#include <gtest/gtest.h>

namespace heddle {

// Calls `call`, which must throw an E, and returns its message.
template <class E = InvalidArgument, class F>
std::string MessageOf(F&& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "an exception of another type: " << error.what();
    return {};
  } catch (...) {
    ADD_FAILURE() << "an exception of another type";
    return {};
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

}  // namespace heddle
