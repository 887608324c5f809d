// A folder of compiled programs that outlives the process.
#ifndef JAXNORM_LAUNCHER_CACHE_H_
#define JAXNORM_LAUNCHER_CACHE_H_

#include <cstdint>
#include <string>

namespace jaxnorm {

// An entry is a file that holds its whole key, the compiler's log, the code and a checksum. Any other file is no entry:
// its program is compiled again, and the file is replaced. Files are written under another name and renamed, so several
// processes can share a folder. Other users must not be able to write to the folder. Never fails: a program whose entry
// cannot be read or written is compiled each time.
class Cache {
 public:
  // Uses `folder`, made if needed; "" is no folder. Beyond `limit` bytes the entries used longest ago are removed.
  Cache(const std::string& folder, int64_t limit);
  ~Cache();
  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;

  // Why nothing is kept, or "".
  const std::string& off() const { return off_; }

  bool Read(const std::string& key, std::string* cubin, std::string* log) const;
  void Write(const std::string& key, const std::string& cubin, const std::string& log) const;

  // The file that has the entry for `key`, if there is one.
  static std::string FileName(const std::string& key);

 private:
  void RemoveOldest() const;

  int64_t limit_;
  int folder_ = -1;  // descriptor: the folder stays the one that was checked
  std::string off_;
};

}  // namespace jaxnorm

#endif  // JAXNORM_LAUNCHER_CACHE_H_
