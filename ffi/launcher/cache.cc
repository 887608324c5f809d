#include "launcher/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <string_view>
#include <tuple>
#include <vector>

namespace jaxnorm {
namespace {

constexpr std::string_view kMagic = "jaxnorm row program, 1\n";
constexpr std::string_view kSuffix = ".rows";
constexpr std::string_view kUnfinished = ".tmp";
constexpr time_t kAbandoned = 3600;         // seconds after which an unfinished file counts as abandoned
constexpr int64_t kMaxEntry = 256ll << 20;  // bytes

// FNV-1a of 128 bits.
struct Hash {
  unsigned __int128 value = (static_cast<unsigned __int128>(0x6c62272e07bb0142) << 64) | 0x62b821756295c58d;

  explicit Hash(std::string_view text) {
    constexpr unsigned __int128 kPrime = (static_cast<unsigned __int128>(1) << 88) | 0x13b;
    for (unsigned char byte : text) value = (value ^ byte) * kPrime;
  }
  std::string Hex() const {
    std::string text;
    for (int shift = 124; shift >= 0; shift -= 4) text += "0123456789abcdef"[static_cast<int>(value >> shift) & 15];
    return text;
  }
};

void Append(std::string* text, std::string_view part) {
  const uint64_t size = part.size();
  text->append(reinterpret_cast<const char*>(&size), sizeof size);
  text->append(part);
}

bool Take(std::string_view* text, std::string* part) {
  uint64_t size;
  if (text->size() < sizeof size) return false;
  std::memcpy(&size, text->data(), sizeof size);
  text->remove_prefix(sizeof size);
  if (text->size() < size) return false;
  part->assign(text->substr(0, size));
  text->remove_prefix(size);
  return true;
}

bool EndsWith(std::string_view text, std::string_view end) {
  return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

// Files hold code that this process will run, so no other user may be able to write to them.
bool OnlyOurs(const struct stat& status) {
  const bool owner = status.st_uid == geteuid() || status.st_uid == 0;
  return owner && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0;
}

// The whole file, or "" if it is no file that may be read.
std::string ReadFile(int file) {
  struct stat status;
  if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || !OnlyOurs(status) || status.st_size > kMaxEntry)
    return "";
  std::string text(status.st_size, '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t n = read(file, text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return "";
    done += n;
  }
  return text;
}

bool WriteFile(int file, std::string_view text) {
  while (!text.empty()) {
    const ssize_t n = write(file, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    text.remove_prefix(n);
  }
  return true;
}

// Makes `folder` and its parents, for the user alone.
void MakeFolders(const std::filesystem::path& folder) {
  std::filesystem::path made;
  for (const std::filesystem::path& part : folder) {
    made /= part;
    mkdir(made.c_str(), 0700);  // fails for folders that exist
  }
}

}  // namespace

Cache::Cache(const std::string& folder, int64_t limit) : limit_(limit) {
  if (folder.empty() || limit <= 0) {
    off_ = "switched off";
    return;
  }
  MakeFolders(folder);
  folder_ = open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  struct stat status;
  if (folder_ < 0 || fstat(folder_, &status) != 0) {
    off_ = folder + ": " + std::strerror(errno);
  } else if (!OnlyOurs(status)) {
    off_ = folder + ": others can write to it; chmod 700 it, or set JAXNORM_CACHE_DIR to another folder";
  }
  if (!off_.empty() && folder_ >= 0) {
    close(folder_);
    folder_ = -1;
  }
}

Cache::~Cache() {
  if (folder_ >= 0) close(folder_);
}

std::string Cache::FileName(const std::string& key) { return Hash(key).Hex().append(kSuffix); }

bool Cache::Read(const std::string& key, std::string* cubin, std::string* log) const {
  if (folder_ < 0) return false;
  const int file = openat(folder_, FileName(key).c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
  if (file < 0) return false;
  const std::string text = ReadFile(file);
  std::string_view rest = text;
  std::string its_key, its_log, its_cubin, checksum;
  const bool whole = rest.substr(0, kMagic.size()) == kMagic && (rest.remove_prefix(kMagic.size()), true) &&
                     Take(&rest, &its_key) && Take(&rest, &its_log) && Take(&rest, &its_cubin) &&
                     Hash(std::string_view(text).substr(0, text.size() - rest.size())).Hex() == rest;
  const bool hit = whole && its_key == key && !its_cubin.empty();
  if (hit) {
    *cubin = std::move(its_cubin);
    *log = std::move(its_log);
    futimens(file, nullptr);  // used now
  }
  close(file);
  return hit;
}

void Cache::Write(const std::string& key, const std::string& cubin, const std::string& log) const {
  if (folder_ < 0) return;
  std::string text(kMagic);
  Append(&text, key);
  Append(&text, log);
  Append(&text, cubin);
  text += Hash(text).Hex();
  if (static_cast<int64_t>(text.size()) > std::min(limit_, kMaxEntry)) return;

  static std::atomic<int> count{0};
  const std::string name = FileName(key);
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  const std::string unfinished = name + "." + std::to_string(getpid()) + "." + std::to_string(count++) + "." +
                                 std::to_string(now.tv_nsec) + std::string(kUnfinished);
  const int file = openat(folder_, unfinished.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
  if (file < 0) return;
  bool written = WriteFile(file, text);
  written = close(file) == 0 && written;
  if (!written || renameat(folder_, unfinished.c_str(), folder_, name.c_str()) != 0) {
    unlinkat(folder_, unfinished.c_str(), 0);
    return;
  }
  RemoveOldest();
}

void Cache::RemoveOldest() const {
  const int folder = openat(folder_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  DIR* files = folder >= 0 ? fdopendir(folder) : nullptr;
  if (files == nullptr) {
    if (folder >= 0) close(folder);
    return;
  }
  std::vector<std::tuple<int64_t, int64_t, std::string>> entries;  // used at, in ns; bytes; name
  int64_t total = 0;
  while (const dirent* file = readdir(files)) {
    struct stat status;
    const bool entry = EndsWith(file->d_name, kSuffix);
    if (!entry && !EndsWith(file->d_name, kUnfinished)) continue;
    if (fstatat(folder_, file->d_name, &status, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (entry) {
      entries.emplace_back(status.st_mtim.tv_sec * 1'000'000'000ll + status.st_mtim.tv_nsec, status.st_size,
                           file->d_name);
      total += status.st_size;
    } else if (time(nullptr) - status.st_mtime > kAbandoned) {
      unlinkat(folder_, file->d_name, 0);
    }
  }
  closedir(files);
  if (total <= limit_) return;
  std::sort(entries.begin(), entries.end());
  for (const auto& [used, bytes, name] : entries) {
    if (total <= limit_) break;
    unlinkat(folder_, name.c_str(), 0);  // another process may have removed it already
    total -= bytes;
  }
}

}  // namespace jaxnorm
