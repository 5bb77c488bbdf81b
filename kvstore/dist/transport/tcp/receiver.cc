#include "kvstore/dist/transport/tcp/receiver.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/check.h"

namespace heddle::kvstore::dist {

Receiver::Receiver(std::shared_ptr<BufferPool> pool, const WireLimits& limits,
                   std::size_t header_read, Sink sink, OnComplete on_complete)
    : pool_(std::move(pool)),
      limits_(limits),
      header_read_(header_read),
      sink_(std::move(sink)),
      on_complete_(std::move(on_complete)),
      buffer_(kBufferBytes) {
  DCHECK(header_read >= kHeaderBytes && header_read <= kBufferBytes);
}

std::size_t Receiver::Prepare(iovec* runs, std::size_t count) {
  if (begin_ > 0) {  // what is left is less than a header
    std::memmove(buffer_.data(), buffer_.data() + begin_, buffered());
    end_ -= begin_;
    begin_ = 0;
  }
  prepared_payload_ = 0;
  std::size_t used = 0;
  std::size_t lookahead = 0;
  switch (state_) {
    case State::kHeader:
      lookahead = header_read_ - end_;
      break;
    case State::kMeta:
      lookahead = buffer_.size() - end_;
      if (payload_bytes_ > kLongPayload) {
        lookahead = std::min(lookahead, meta_bytes_ - message_.meta.size());
      }
      break;
    case State::kPayload:
      DCHECK(buffered() == 0);
      used = PreparePayload(runs, count - 1, kReadBytes);
      if (prepared_payload_ < rest()) return used;  // no lookahead yet
      lookahead = dropping_ || payload_bytes_ > kLongPayload ? kHeaderBytes : header_read_;
      break;
  }
  runs[used++] = {buffer_.data() + end_, lookahead};
  return used;
}

std::size_t Receiver::PreparePayload(iovec* runs, std::size_t count, std::size_t room) {
  if (landing_ != nullptr && !dropping_) {
    reading_landing_ = landing_->BeginRead();
    dropping_ = !reading_landing_;
  }
  if (dropping_) {
    // No memory of the landing is touched any more; what comes goes over one another in the buffer.
    prepared_payload_ = std::min<std::uint64_t>({rest(), room, buffer_.size() - kHeaderBytes});
    runs[0] = {buffer_.data() + kHeaderBytes, prepared_payload_};
    return 1;
  }
  GrowPayload();
  std::size_t used = 0;
  std::size_t skip = run_bytes_;
  for (std::size_t i = run_; i < runs_.size() && used < count && room > 0; ++i) {
    const std::size_t bytes = std::min(runs_[i].size() - skip, room);
    runs[used++] = {runs_[i].data() + skip, bytes};
    skip = 0;
    room -= bytes;
    prepared_payload_ += bytes;
  }
  return used;
}

std::string Receiver::Commit(std::size_t bytes) {
  const std::size_t of_payload = std::min(bytes, prepared_payload_);
  prepared_payload_ = 0;
  if (reading_landing_) {
    reading_landing_ = false;
    landing_->EndRead();
  }
  if (of_payload > 0) {
    received_ += of_payload;
    run_bytes_ += of_payload;
    SkipFullRuns();
  }
  end_ += bytes - of_payload;
  return Parse();
}

std::string Receiver::Parse() {
  for (;;) {
    switch (state_) {
      case State::kHeader: {
        if (buffered() < kHeaderBytes) return {};
        std::string wrong = TakeHeader();
        if (!wrong.empty()) return wrong;
        break;
      }
      case State::kMeta:
        TakeMeta();
        if (message_.meta.size() < meta_bytes_) return {};
        if (payload_bytes_ > 0) {
          BeginPayload();
        } else if (!Deliver()) {
          return {};
        }
        break;
      case State::kPayload:
        TakePayload();
        if (received_ < payload_bytes_) return {};
        if (!Deliver()) return {};
        break;
    }
  }
}

std::string Receiver::TakeHeader() {
  message_ = Message{};
  std::string wrong =
      DecodeHeader(std::span<const std::byte, kHeaderBytes>(buffer_.data() + begin_, kHeaderBytes),
                   limits_, &message_, &meta_bytes_, &payload_bytes_);
  begin_ += kHeaderBytes;
  state_ = State::kMeta;
  return wrong;
}

void Receiver::TakeMeta() {
  const std::size_t bytes = std::min(meta_bytes_ - message_.meta.size(), buffered());
  message_.meta.append(reinterpret_cast<const char*>(buffer_.data() + begin_), bytes);
  begin_ += bytes;
}

void Receiver::BeginPayload() {
  state_ = State::kPayload;
  received_ = 0;
  run_ = 0;
  run_bytes_ = 0;
  landing_ = sink_.land(message_, payload_bytes_);
  if (landing_ == nullptr) return;
  const auto runs = landing_->runs();
  runs_.assign(runs.begin(), runs.end());
  std::uint64_t bytes = 0;
  for (const auto& run : runs_) bytes += run.size();
  CHECK(bytes == payload_bytes_, "a landing of {} bytes for a payload of {}", bytes,
        payload_bytes_);
  SkipFullRuns();
}

// The next chunk, when those that there are are full.
void Receiver::GrowPayload() {
  if (landing_ != nullptr || received_ < chunk_bytes_) return;
  const std::size_t bytes =
      std::min<std::uint64_t>(BufferPool::kBytesMax, payload_bytes_ - chunk_bytes_);
  chunks_.push_back(pool_->Take(bytes));
  runs_.emplace_back(chunks_.back().get(), bytes);
  chunk_bytes_ += bytes;
}

// From the buffer to where the payload goes.
void Receiver::TakePayload() {
  while (received_ < payload_bytes_ && buffered() > 0) {
    std::size_t bytes = std::min<std::uint64_t>(rest(), buffered());
    if (landing_ != nullptr && !dropping_) dropping_ = !landing_->BeginRead();
    if (!dropping_) {
      GrowPayload();
      const auto to = runs_[run_].subspan(run_bytes_);
      bytes = std::min(bytes, to.size());
      std::memcpy(to.data(), buffer_.data() + begin_, bytes);
      if (landing_ != nullptr) landing_->EndRead();
    }
    begin_ += bytes;
    received_ += bytes;
    run_bytes_ += bytes;
    SkipFullRuns();
  }
}

void Receiver::SkipFullRuns() {
  if (dropping_) return;
  while (run_ < runs_.size() && run_bytes_ >= runs_[run_].size()) {
    run_bytes_ -= runs_[run_].size();
    ++run_;
  }
}

void Receiver::Restart() {
  EndPayload();
  begin_ = end_ = 0;
}

void Receiver::EndPayload() {
  landing_ = nullptr;
  dropping_ = false;
  runs_.clear();
  chunks_.clear();
  chunk_bytes_ = 0;
  state_ = State::kHeader;
}

bool Receiver::Deliver() {
  on_complete_(message_, message_.meta.size() + payload_bytes_);
  if (payload_bytes_ > 0 && !dropping_) {
    if (landing_ != nullptr) {
      message_.payload = landing_->Finish();
    } else if (chunks_.size() == 1) {
      message_.payload = Payload(std::move(chunks_[0]), runs_[0]);
      message_.payload.set_owned_alone();
    } else {
      std::vector<std::span<const std::byte>> runs(runs_.begin(), runs_.end());
      message_.payload =
          Payload(std::make_shared<std::vector<std::shared_ptr<std::byte>>>(std::move(chunks_)),
                  std::move(runs));
    }
  }
  EndPayload();
  const bool more = sink_.deliver(std::move(message_));
  message_.payload = {};  // if nobody wanted it
  return more;
}

}  // namespace heddle::kvstore::dist
