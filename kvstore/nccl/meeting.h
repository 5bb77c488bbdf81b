// How the processes of a job talk before, and beside, NCCL: what each has to say comes to all.
//
// Order:   every process makes the same calls, in the same order; each returns when all processes
//          have made it.
// Errors:  what the means of the meeting throws where a process does not come, or is gone, or where
//          the wait for it is interrupted. This process is out of step with the others then:
//          nothing of the meeting is good for anything but Fail.
// Threads: one call at a time, failure() and Fail() apart, which any thread may call.
#pragma once

#include <heddle/ndarray.h>

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace heddle::kvstore {

// What others are told of an error.
std::string WhatOf(const std::exception_ptr& error);

// What a process says of one thing: words of any bytes.
using Words = std::vector<std::string>;
// As one text: of each word its length in decimal digits, a ':', and its bytes.
std::string PackWords(const Words& words);
// InvalidState for a text that is none of these.
Words UnpackWords(std::string_view text);

class Meeting {
 public:
  virtual ~Meeting() = default;

  virtual int rank() const = 0;  // of this process, from 0
  virtual int processes() const = 0;

  // This process has something on gpu(device). Some meetings begin with that, and are not ready
  // before.
  virtual void Use(int /*device*/) {}
  virtual bool ready() const { return true; }

  // The texts of all processes, none of which is empty, by rank.
  std::vector<std::string> Exchange(const std::string& text);
  // The values of process 0, which are here where `values` are: all processes' have the same
  // shapes and dtypes. None is poisoned.
  virtual std::vector<NDArray> Share(const std::vector<NDArray>& values);

  // Why this job cannot go on, if a process of it is gone or has failed. Neither this nor Fail
  // waits for anybody.
  virtual std::optional<std::string> failure() { return std::nullopt; }
  // This process cannot go on: the others are told why, where there are means to.
  virtual void Fail(const std::string& /*why*/) {}

 protected:
  using Bytes = std::vector<std::uint8_t>;
  // The sums over all processes, whose `bytes` have the same length, which is not 0. No sum is
  // above 255.
  virtual Bytes Add(const Bytes& bytes) = 0;
};

}  // namespace heddle::kvstore
