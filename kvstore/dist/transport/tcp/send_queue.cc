#include "kvstore/dist/transport/tcp/send_queue.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/check.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {
namespace {

void Append(std::span<const std::byte> bytes, std::vector<std::byte>* to) {
  to->insert(to->end(), bytes.begin(), bytes.end());
}

void AppendHeaderAndMeta(const Message& message, std::vector<std::byte>* to) {
  const std::size_t at = to->size();
  to->resize(at + kHeaderBytes);
  EncodeHeader(message, std::span<std::byte, kHeaderBytes>(to->data() + at, kHeaderBytes));
  Append(std::as_bytes(std::span(message.meta)), to);
}

}  // namespace

bool SendQueue::AddSmall(const Message& message) {
  const std::size_t bytes = kHeaderBytes + message.meta.size() + message.payload.bytes();
  bool wants_to_go = false;
  if (pack_ != nullptr && pack_->head.size() + bytes > kPackBytes) {
    ClosePack();
    wants_to_go = true;
  }
  if (pack_ == nullptr) {
    pack_ = spare_pack_ != nullptr ? std::move(spare_pack_) : std::make_unique<Item>();
    pack_->head.reserve(kPackBytes);
    pack_->messages = 0;
    pack_->priority = message.priority;
    pack_->age = next_age_++;
  }
  AppendHeaderAndMeta(message, &pack_->head);
  for (const auto& run : message.payload.runs()) Append(run, &pack_->head);
  pack_->priority = std::max(pack_->priority, message.priority);
  if (++pack_->messages < kPackMessages) return wants_to_go;
  ClosePack();
  return true;
}

void SendQueue::Add(Transport::SendId id, Message message, std::function<void()> sent) {
  if (pack_ != nullptr) ClosePack();  // it is older
  auto item = std::make_unique<Item>();
  item->priority = message.priority;
  item->age = next_age_++;
  item->id = id;
  item->head.reserve(kHeaderBytes + message.meta.size());
  AppendHeaderAndMeta(message, &item->head);
  item->payload = std::move(message.payload);
  item->sent = std::move(sent);
  Push(std::move(item));
}

void SendQueue::Push(std::unique_ptr<Item> item) {
  heap_.push_back(std::move(item));
  std::push_heap(heap_.begin(), heap_.end(), Later);
}

void SendQueue::ClosePack() { Push(std::move(pack_)); }

bool SendQueue::TakeNext() {
  if (heap_.empty()) {
    if (pack_ == nullptr) return false;
    ClosePack();
  }
  std::pop_heap(heap_.begin(), heap_.end(), Later);
  going_.push_back(std::move(heap_.back()));
  heap_.pop_back();
  return true;
}

// Those that were fetched but of which nothing was sent, and that something more urgent has come
// behind.
void SendQueue::PutBackWhatIsOvertaken() {
  while (!going_.empty() && !going_.back()->begun && !heap_.empty() &&
         Later(going_.back(), heap_.front())) {
    auto overtaken = std::move(going_.back());
    going_.pop_back();
    // The heap keeps its top: that one is more urgent.
    Push(std::move(overtaken));
  }
}

std::size_t SendQueue::Fetch(iovec* runs, std::size_t count) {
  PutBackWhatIsOvertaken();
  if (going_.empty()) TakeNext();
  std::size_t room = kFetchBytes;
  std::size_t used = 0;
  const auto put = [&](std::span<const std::byte> run, std::size_t* skip) {
    if (*skip >= run.size()) {
      *skip -= run.size();
      return;
    }
    const std::size_t bytes = std::min(run.size() - *skip, room);
    // The kernel only reads.
    runs[used++] = {const_cast<std::byte*>(run.data()) + *skip, bytes};
    *skip = 0;
    room -= bytes;
  };
  for (std::size_t i = 0; room > 0 && used < count; ++i) {
    if (i == going_.size() && !TakeNext()) break;
    const Item& item = *going_[i];
    std::size_t skip = item.bytes_sent;
    put(item.head, &skip);
    for (const auto& run : item.payload.runs()) {
      if (room == 0 || used == count) break;
      put(run, &skip);
    }
  }
  return used;
}

void SendQueue::Advance(std::size_t bytes, Ended* ended) {
  while (bytes > 0) {
    Item& item = *going_.front();
    const std::size_t taken = std::min(bytes, item.bytes() - item.bytes_sent);
    item.bytes_sent += taken;
    item.begun = true;
    bytes -= taken;
    if (item.bytes_sent < item.bytes()) {
      DCHECK(bytes == 0);  // Q1
      return;
    }
    std::unique_ptr<Item> done = std::move(going_.front());
    going_.pop_front();
    if (done->id != 0) {
      ended->push_back(std::move(done));
    } else {
      done->head.clear();
      done->begun = false;
      done->bytes_sent = 0;
      spare_pack_ = std::move(done);
    }
  }
}

Revoked SendQueue::Revoke(Transport::SendId id, Ended* ended) {
  for (std::size_t i = 0; i < going_.size(); ++i) {
    if (going_[i]->id != id) continue;
    Item& item = *going_[i];
    if (!item.begun) {
      ended->push_back(std::move(going_[i]));
      going_.erase(going_.begin() + static_cast<std::ptrdiff_t>(i));
      return Revoked::kDropped;
    }
    auto rest = std::make_unique<Item>();
    rest->priority = item.priority;
    rest->age = item.age;
    rest->head.reserve(item.bytes() - item.bytes_sent);
    std::size_t skip = item.bytes_sent;
    const auto copy = [&](std::span<const std::byte> run) {
      const std::size_t skipped = std::min(skip, run.size());
      skip -= skipped;
      Append(run.subspan(skipped), &rest->head);
    };
    copy(item.head);
    for (const auto& run : item.payload.runs()) copy(run);
    rest->begun = true;
    std::swap(going_[i], rest);
    ended->push_back(std::move(rest));
    return Revoked::kCopied;
  }
  const auto queued =
      std::find_if(heap_.begin(), heap_.end(), [id](const auto& item) { return item->id == id; });
  if (queued == heap_.end()) return Revoked::kSent;
  ended->push_back(std::move(*queued));
  heap_.erase(queued);
  std::make_heap(heap_.begin(), heap_.end(), Later);
  return Revoked::kDropped;
}

void SendQueue::Clear(Ended* ended) {
  std::move(going_.begin(), going_.end(), std::back_inserter(*ended));
  std::move(heap_.begin(), heap_.end(), std::back_inserter(*ended));
  if (pack_ != nullptr) ended->push_back(std::move(pack_));
  going_.clear();
  heap_.clear();
}

}  // namespace heddle::kvstore::dist
