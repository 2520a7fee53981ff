const steps = [...document.querySelectorAll('section.walk')];
const place = document.getElementById('place');
let now = 0;
function show(index) {
  now = Math.min(Math.max(index, 0), steps.length - 1);
  steps.forEach((step, i) => { step.hidden = i !== now; });
  document.getElementById('about').hidden = now > 0;
  place.textContent = (now + 1) + ' of ' + steps.length;
  document.getElementById('back').disabled = now === 0;
  document.getElementById('on').disabled = now === steps.length - 1;
  if (location.hash !== '#' + (now + 1)) history.replaceState(null, '', '#' + (now + 1));
}
document.getElementById('back').onclick = () => show(now - 1);
document.getElementById('on').onclick = () => show(now + 1);
document.addEventListener('keydown', (event) => {
  if (event.altKey || event.ctrlKey || event.metaKey) return;
  const to = { ArrowRight: now + 1, ArrowLeft: now - 1, n: now + 1, p: now - 1, ' ': now + 1,
    Home: 0, End: steps.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(to);
});
window.addEventListener('hashchange', () => show((parseInt(location.hash.slice(1)) || 1) - 1));
document.body.classList.add('stepped');
show((parseInt(location.hash.slice(1)) || 1) - 1);
