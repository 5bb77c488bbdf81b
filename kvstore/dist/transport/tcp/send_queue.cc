#include "kvstore/dist/transport/tcp/send_queue.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <span>
#include <utility>

#include "base/check.h"
#include "kvstore/dist/protocol/wire.h"

namespace heddle::kvstore::dist {
namespace {

// What a message can say has come.
constexpr std::uint64_t kArrivalsMax = std::numeric_limits<std::uint8_t>::max();

std::span<std::byte, kHeaderBytes> FirstHeaderOf(std::vector<std::byte>& head) {
  return std::span<std::byte, kHeaderBytes>(head.data(), kHeaderBytes);
}

void Append(std::span<const std::byte> bytes, std::vector<std::byte>* to) {
  to->insert(to->end(), bytes.begin(), bytes.end());
}

void AppendHeaderAndMeta(const Message& message, std::vector<std::byte>* to) {
  const std::size_t at = to->size();
  to->resize(at + kHeaderBytes);
  EncodeHeader(message, std::span<std::byte, kHeaderBytes>(to->data() + at, kHeaderBytes));
  Append(std::as_bytes(std::span(message.meta)), to);
}

// Of a pack, the first ones.
void SkipMessages(std::uint64_t count, SendQueue::Item* pack) {
  std::size_t at = 0;
  for (std::uint64_t i = 0; i < count; ++i) {
    Message message;
    std::uint32_t meta_bytes = 0;
    std::uint64_t payload_bytes = 0;
    const std::string wrong =
        DecodeHeader(std::span<const std::byte, kHeaderBytes>(pack->head.data() + at, kHeaderBytes),
                     {}, &message, &meta_bytes, &payload_bytes);
    CHECK(wrong.empty());
    at += kHeaderBytes + meta_bytes + payload_bytes;
  }
  pack->head.erase(pack->head.begin(), pack->head.begin() + static_cast<std::ptrdiff_t>(at));
  pack->messages -= count;
}

// From now on the item is in memory of its own.
void CopyPayload(std::unique_ptr<SendQueue::Item>* item, SendQueue::Ended* ended) {
  auto copy = std::make_unique<SendQueue::Item>();
  copy->priority = (*item)->priority;
  copy->age = (*item)->age;
  copy->id = (*item)->id;
  copy->begun = (*item)->begun;
  copy->bytes_sent = (*item)->bytes_sent;
  copy->head.reserve((*item)->bytes());
  Append((*item)->head, &copy->head);
  for (const auto& run : (*item)->payload.runs()) Append(run, &copy->head);
  item->swap(copy);
  ended->push_back(std::move(copy));
}

}  // namespace

void SendQueue::Release(Ended ended) {
  for (auto& item : ended) {
    item->payload = {};
    if (item->sent) item->sent();
  }
}

bool SendQueue::AddSmall(const Message& message) {
  const std::size_t bytes = kHeaderBytes + message.body_bytes();
  bool wants_to_go = false;
  if (pack_ != nullptr && pack_->head.size() + bytes > kPackBytes) {
    ClosePack();
    wants_to_go = true;
  }
  if (pack_ == nullptr) {
    pack_ = TakeSpare();
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

void SendQueue::ConfirmArrivals() {
  if (!held() && !OnlyRestOfOneWaits() && arrived_ - said_ <= kArrivalsMax) return;
  const bool midway = !going_.empty() && going_.front()->bytes_sent > 0;  // Q1
  const auto at = going_.begin() + (midway ? 1 : 0);
  if (at != going_.end() && (*at)->control) return;
  std::unique_ptr<Item> item = TakeSpare();
  item->control = true;
  item->begun = true;  // it keeps its place
  going_.insert(at, std::move(item));
}

void SendQueue::Say(std::uint64_t arrivals, Item* item) {
  if (item->control) {
    item->arrivals = arrivals;
    item->head.clear();
    AppendHeaderAndMeta({.kind = Kind::kReceived, .sequence = arrived_}, &item->head);
  } else {
    item->arrivals = std::min(arrivals, kArrivalsMax);
    SetArrivals(static_cast<std::uint8_t>(item->arrivals), FirstHeaderOf(item->head));
  }
}

std::unique_ptr<SendQueue::Item> SendQueue::TakeSpare() {
  std::unique_ptr<Item> pack;
  if (spares_.empty()) {
    pack = std::make_unique<Item>();
    pack->head.reserve(kPackBytes);
  } else {
    pack = std::move(spares_.back());
    spares_.pop_back();
  }
  pack->messages = 0;
  return pack;
}

void SendQueue::Recycle(std::unique_ptr<Item> pack) {
  if (spares_.size() == kSparesMax) return;
  pack->head.clear();
  pack->begun = false;
  pack->control = false;
  pack->arrivals = 0;
  pack->bytes_sent = 0;
  spares_.push_back(std::move(pack));
}

void SendQueue::End(std::unique_ptr<Item> item, Ended* ended) {
  if (item->id == 0) {
    Recycle(std::move(item));
  } else {
    ended->push_back(std::move(item));
  }
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

std::size_t SendQueue::Fetch(iovec* runs, std::size_t count, std::size_t bytes_max) {
  PutBackWhatIsOvertaken();
  const bool only_begun = held();
  std::uint64_t unsaid = arrived_ - said_;
  std::size_t room = bytes_max;
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
    if (i == going_.size() && (only_begun || !TakeNext())) break;
    Item& item = *going_[i];
    if (only_begun && !GoesThoughHeld(item)) break;
    if (retains_ && item.bytes_sent == 0) {
      Say(unsaid, &item);
      unsaid -= item.arrivals;
    }
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
    if (item.bytes_sent == 0) said_ += item.arrivals;
    item.bytes_sent += taken;
    item.begun = true;
    bytes -= taken;
    if (item.bytes_sent < item.bytes()) {
      DCHECK(bytes == 0);  // Q1
      return;
    }
    std::unique_ptr<Item> done = std::move(going_.front());
    going_.pop_front();
    if (retains_ && !done->control) {
      Retain(std::move(done));
    } else {
      End(std::move(done), ended);
    }
  }
  if (retains_) Confirm(said_received_, ended);
}

void SendQueue::Retain(std::unique_ptr<Item> item) {
  retained_bytes_ += item->bytes();
  if (item->id == 0 && !retained_.empty() && retained_.back()->id == 0 &&
      retained_.back()->head.size() + item->head.size() <= kPackBytes) {
    SetArrivals(0, FirstHeaderOf(item->head));  // Q6
    Append(item->head, &retained_.back()->head);
    retained_.back()->messages += item->messages;
    Recycle(std::move(item));
  } else {
    retained_.push_back(std::move(item));
  }
}

void SendQueue::Confirm(std::uint64_t received, Ended* ended) {
  said_received_ = std::max(said_received_, received);
  while (!retained_.empty() && confirmed_ + retained_.front()->messages <= said_received_) {
    confirmed_ += retained_.front()->messages;
    retained_bytes_ -= retained_.front()->bytes();
    End(std::move(retained_.front()), ended);
    retained_.pop_front();
  }
}

bool SendQueue::owed() const {
  return retained_bytes_ > kUnconfirmedMax ||
         std::any_of(retained_.begin(), retained_.end(),
                     [](const auto& item) { return item->id != 0; });
}

void SendQueue::Cut() {
  std::erase_if(going_, [](const auto& item) { return item->control; });
  for (const auto& item : going_) item->begun = true;
}

bool SendQueue::Restart(std::uint64_t received, Ended* ended) {
  if (received < confirmed_) return false;
  std::uint64_t arrived = received - confirmed_;
  going_.insert(going_.begin(), std::make_move_iterator(retained_.begin()),
                std::make_move_iterator(retained_.end()));
  retained_.clear();
  retained_bytes_ = 0;
  for (; arrived > 0 && !going_.empty() && going_.front()->messages <= arrived;
       going_.pop_front()) {
    arrived -= going_.front()->messages;
    End(std::move(going_.front()), ended);
  }
  if (arrived > 0 && going_.empty()) return false;
  if (arrived > 0) SkipMessages(arrived, going_.front().get());
  for (const auto& item : going_) {
    item->begun = true;
    item->bytes_sent = 0;
  }
  confirmed_ = received;
  said_received_ = received;
  said_ = arrived_;
  return true;
}

void SendQueue::Raise(Transport::SendId id, std::int32_t priority) {
  const auto queued = std::ranges::find(heap_, id, [](const auto& item) { return item->id; });
  if (queued == heap_.end() || (*queued)->priority >= priority) return;
  (*queued)->priority = priority;
  std::make_heap(heap_.begin(), heap_.end(), Later);
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
    CopyPayload(&going_[i], ended);
    return Revoked::kCopied;
  }
  const auto queued =
      std::find_if(heap_.begin(), heap_.end(), [id](const auto& item) { return item->id == id; });
  if (queued == heap_.end()) {
    const auto sent = std::find_if(retained_.begin(), retained_.end(),
                                   [id](const auto& item) { return item->id == id; });
    if (sent != retained_.end()) CopyPayload(&*sent, ended);
    return Revoked::kSent;
  }
  ended->push_back(std::move(*queued));
  heap_.erase(queued);
  std::make_heap(heap_.begin(), heap_.end(), Later);
  return Revoked::kDropped;
}

void SendQueue::Clear(Ended* ended) {
  std::move(retained_.begin(), retained_.end(), std::back_inserter(*ended));
  retained_.clear();
  retained_bytes_ = 0;
  std::move(going_.begin(), going_.end(), std::back_inserter(*ended));
  std::move(heap_.begin(), heap_.end(), std::back_inserter(*ended));
  if (pack_ != nullptr) ended->push_back(std::move(pack_));
  going_.clear();
  heap_.clear();
}

}  // namespace heddle::kvstore::dist
